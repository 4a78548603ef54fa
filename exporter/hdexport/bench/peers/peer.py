"""A peer: another library's way to run a bundle's model; the cases that it opens, their texts, and the folder of the
checkpoint that it loads."""

from __future__ import annotations

import functools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from hdexport.attention.kinds import attention_of
from hdexport.bench.results.result import OutputError, PeakMemory
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.verify.single_texts import ENGLISH, sample_ids
from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.inference.inputs import checked_inputs
from hdruntime.optional import is_installed

if TYPE_CHECKING:
    from hdexport.checkpoint import Checkpoint

Inputs = Mapping[str, AnyArray]

_FOLDER = "checkpoint"

_STREAM_TOKENS = 16_381
"""Tokens that texts are cut from; a prime number, so that no two rows of a batch begin at the same place."""

_QUESTION_TOKENS = 8
"""Tokens before the separator, if a bundle marks the tokens of questions."""


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """One PyTorch model; bundles of other precisions and backends may share it.

    Attributes:
        bundle: gives the task, positions and attention; of several bundles the one with the longest texts.
        checkpoint: a directory, or ``organisation/name`` on the Hugging Face hub; None where it is not here, which
            leaves out PyTorch's answers and the peers.
    """

    bundle: Path
    checkpoint: str | None
    trust: Trust = UNTRUSTED


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """The description of a case, for its process.

    Attributes:
        runner: a backend of the runtime or a peer, as in `Series.runner`.
        bundle: the bundle that is run, or whose model a peer runs.
        artefact: the folder or file that the peer prepared; None for backends.
        inputs: an ``.npz`` of the inputs of the bundle's manifest, int64 [batch, tokens] each.
        expected: a folder of PyTorch's outputs in float32, one ``.npy`` file each; None measures without comparing.
        device: ``cpu`` or ``cuda``.
        precision: the precision that a bundle is asked to compute in; peers have their own.
        least_seconds: least duration of the timed runs together; 0 is a probe of memory, which is not warmed up.
    """

    runner: str
    bundle: Path
    inputs: Path
    artefact: Path | None = None
    expected: Path | None = None
    device: str = "cpu"
    precision: Precision = Precision.AUTO
    threads: int = 1
    least_runs: int = 1
    least_seconds: float = 0.0


class CaseFigures(NamedTuple):
    """The figures of one process.

    Attributes:
        latencies_ms: of each timed run, in order.
        is_stable: whether the latency no longer changed at the end of the warm-up.
        memory: its peaks.
        error: None where nothing was compared.
        precision: the precision that it computed in; ``auto`` on a GPU.
    """

    latencies_ms: tuple[float, ...]
    is_stable: bool
    memory: PeakMemory
    error: OutputError | None
    precision: Precision = Precision.AUTO


@dataclass(frozen=True)
class OpenCase:
    """A case that is ready to run.

    Attributes:
        call: runs the batch from host to host: name of an output of the manifest -> [batch, ...] array.
        half_precision: whether it computes in half precision, or with weights that were rounded to it.
        precision: the precision that it computes in on a CPU.
        allocator_bytes: peak of PyTorch's allocator on the GPU since the process began; None elsewhere.
        engine_bytes: memory that an engine and its contexts take on the GPU now, by their own report; None
            elsewhere.
    """

    call: Callable[[], dict[str, FloatArray]]
    half_precision: bool
    precision: Precision = Precision.FLOAT32
    allocator_bytes: Callable[[], int | None] = lambda: None
    engine_bytes: Callable[[], int | None] = lambda: None
    close: Callable[[], None] = lambda: None


class Prepared(NamedTuple):
    """A peer's artefact, and what readers of its figures should know about it."""

    artefact: Path
    remark: str | None = None


class Peer(ABC):
    """Another library's way to run a model; by default the artefact is the checkpoint's folder."""

    name: ClassVar[str]
    """The peer's name on the command line."""

    example_tokens: ClassVar[int | None] = None
    """Tokens of the texts that the model is exported with; None where it is not exported."""

    @abstractmethod
    def unavailable(self, manifest: Manifest) -> str | None:
        """Why it cannot run here, or not this model, with the command that installs it; None if it can."""

    @abstractmethod
    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Loads the artefact of `prepare`; `inputs` are name -> [batch, tokens]."""

    def remark(self, manifest: Manifest) -> str | None:
        """Parts of the bundle's computation that the peer does not know, or else that its export lacks."""
        items = attention_of(manifest)
        remarks = [item.record.peer_remark for item in items]
        positions = manifest.positions
        if positions.form == "by_length":
            remarks.append(f"stretches positions for {manifest.max_len} tokens: its answers to shorter texts differ")
        if positions.rope_factor is not None:
            remarks.append(f"has the checkpoint's rotary base, not {positions.rope_factor:g} times it: answers differ")
        if manifest.adapter is not None:
            remarks.append(f"runs without the adapter {manifest.adapter}: answers differ")
        if not any(remarks) and self.example_tokens is not None:
            of_export = [item.record.export_remark(self.example_tokens) for item in items]
            return next(filter(None, of_export), None)
        return "; ".join(filter(None, remarks)) or None

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Makes the artefact in `folder`, which all peers of the model share; nothing is left half-written. `device` is
        ``cpu`` or ``cuda``."""
        return Prepared(artefact=checkpoint_folder(subject, folder))


def runs_in_half(device: str, manifest: Manifest) -> bool:
    """Whether a peer computes in half precision: on a GPU, where the bundle does."""
    return device == "cuda" and manifest.dtype != "float32"


def staged_artefact(folder: Path, file: str) -> AbstractContextManager[Path]:
    """A directory to make `file` in; it takes the place of `folder` when the block ends cleanly."""
    kind = DirectoryKind(
        name="peer's model", marker=file, is_one=lambda directory: True, foreign_files=lambda directory: []
    )
    return staged_directory(folder, kind, force=True)


def not_installed(*packages: str, install: str) -> str | None:
    """Which packages, by import names, are missing, with the command that installs them; None if all are here."""
    missing = [name for name in packages if not is_installed(name)]
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {install}" if missing else None


def first_cause(error: BaseException) -> str:
    """The first error in a line: PyTorch's exporter and compiler wrap it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def checkpoint_folder(subject: MeasuredModel, folder: Path) -> Path:
    """The checkpoint with its positions extended, as a Hugging Face folder that is made once for all peers; a
    checkpoint that computes its positions is itself that folder. Positions by each text's length are stretched for the
    longest text."""
    from hdexport.checkpoint import find_checkpoint
    from hdexport.checkpoint.heads import task_head
    from hdexport.extend import ExtendOptions, extend
    from hdexport.model.positions import TABLES
    from hdexport.verify.pytorch_reference import positions_of
    from hdruntime.bundle.manifest import Scheme

    assert subject.checkpoint is not None
    checkpoint = find_checkpoint(subject.checkpoint, trust=subject.trust)
    manifest = open_bundle(subject.bundle, check_files=False).manifest
    # Peers load pickles and code, so those that are not trusted are refused here.
    checkpoint.weight_files()
    task_head(checkpoint, manifest.task)
    is_extended = manifest.positions.rows > manifest.positions.base
    if not checkpoint.family.learned_positions or not (
        is_extended or checkpoint.family.stores_table(checkpoint.config)
    ):
        return _lasting(checkpoint, folder / _FOLDER)
    output = folder / _FOLDER
    if output.exists():
        return output
    max_len, scheme, alpha = positions_of(manifest, checkpoint.family, checkpoint.config)
    if scheme not in TABLES:
        # A checkpoint's files cannot express positions by length; the peer's remark says so.
        scheme = Scheme.INTERPOLATE_STATIC
    options = ExtendOptions(
        model=checkpoint.path,
        output=output,
        max_len=max_len,
        scheme=scheme,
        alpha=alpha,
        trust=subject.trust,
    )
    extend(options)
    return output


def _lasting(checkpoint: Checkpoint, output: Path) -> Path:
    """The checkpoint's directory; a copy of a converted one, which would be removed when this process ends."""
    if checkpoint.path == checkpoint.origin:
        return checkpoint.path
    if not output.exists():
        shutil.copytree(checkpoint.path, output)
    return output


class Texts:
    """Batches of texts of any length for a bundle, the same ones in every process. There is no padding, and every
    English text begins and ends with the tokenizer's special tokens."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def batch(self, batch: int, tokens: int) -> dict[str, AnyArray]:
        """Every input of the bundle's manifest, name -> [batch, tokens]; `tokens` includes special tokens."""
        return self._inputs(np.stack([self._text(row, tokens) for row in range(batch)]))

    def alone(self, lengths: Sequence[int]) -> list[dict[str, AnyArray]]:
        """Different texts, each by itself: every input of the manifest, name -> [1, tokens], per text."""
        return [self._inputs(self._text(row, tokens)[np.newaxis]) for row, tokens in enumerate(lengths)]

    def _inputs(self, rows: IntArray) -> dict[str, AnyArray]:
        tokens = rows.shape[1]
        # The runtime fills in the other inputs: masks of ones, token types of zeros, its default of global tokens.
        manifest = self._bundle.manifest
        marks = manifest.input_of(Role.MARKS)
        if marks is not None and marks.default.token_id is not None:
            rows[:, min(_QUESTION_TOKENS, marks.bound or _QUESTION_TOKENS, tokens - 1)] = marks.default.token_id
        # Peers run texts alone.
        return checked_inputs({manifest.ids: rows}, manifest, memory=manifest.least_memory)

    def _text(self, row: int, tokens: int) -> IntArray:
        before, content, after = self._frame
        length = max(0, tokens - len(before) - len(after))
        places = (row * (length + 1) + np.arange(length)) % len(content)
        return np.concatenate([before, content[places], after])[-tokens:]

    @functools.cached_property
    def _frame(self) -> tuple[IntArray, ...]:
        """The ids at the beginning of every text, the ids that its middle is cut from, and those at its end."""
        (ids,), kind = sample_ids(self._bundle, [_STREAM_TOKENS])
        return (ids[:1], ids[1:-1], ids[-1:]) if kind == ENGLISH else (ids[:0], ids, ids[:0])
