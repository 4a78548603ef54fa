"""A baseline: another way to run a bundle's model; its cases, their texts, and the checkpoint that it loads."""

from __future__ import annotations

import functools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from hdexport.attention.registry import attention_of
from hdexport.bench.results.result import ModelChange, OutputError, PeakMemory
from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.model.positions import TABLES
from hdexport.verify.pytorch_reference import positions_of
from hdexport.verify.single_texts import ENGLISH, sample_ids
from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest, Role, Scheme
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.inference.inputs import checked_inputs
from hdruntime.optional import is_installed

Inputs = Mapping[str, AnyArray]

_FOLDER = "checkpoint"

_STREAM_TOKENS = 16_381
"""Tokens from which sequences are taken; a prime number, so that no two rows of a batch start at one offset."""

_QUESTION_TOKENS = 8
"""Tokens before the separator, if the tokens of a question are global tokens of a bundle."""


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A PyTorch model; bundles of several precisions and backends may share it.

    Attributes:
        bundle: bundle that defines task, positions and attention; of several bundles the one with the largest max_len.
        checkpoint: directory, or ``organisation/name`` on the Hugging Face Hub; None if the checkpoint is missing.
            Then the outputs of PyTorch and the baselines are left out.
    """

    bundle: Path
    checkpoint: str | None
    trust: Trust = UNTRUSTED


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """Description of a case for its process.

    Attributes:
        bundle: bundle that is run, or the bundle of the model that a baseline runs.
        inputs: ``.npz`` file with the inputs of the manifest, int64 [batch, tokens] each.
        backend: backend that runs the bundle; empty for a baseline.
        baseline: baseline that runs the model; None for a backend.
        artefact: directory or file that the baseline prepared; None for a backend.
        expected: directory of PyTorch's outputs in float32, one ``.npy`` file each; None compares nothing.
        device: ``cpu`` or ``cuda``.
        precision: requested precision of a bundle; a baseline has its own precision.
        min_seconds: minimum duration of all timed runs together; 0 measures the memory of one call without a warm-up.
    """

    bundle: Path
    inputs: Path
    backend: str = ""
    baseline: Baseline | None = None
    artefact: Path | None = None
    expected: Path | None = None
    device: str = "cpu"
    precision: Precision = Precision.AUTO
    threads: int = 1
    min_runs: int = 1
    min_seconds: float = 0.0


class CaseFigures(NamedTuple):
    """Figures of one process.

    Attributes:
        latencies_ms: latency of each timed run, in order.
        is_stable: whether the latency was stable at the end of the warm-up.
        memory: peak memory.
        error: difference from PyTorch's outputs; None if nothing was compared.
        precision: precision of the computation; ``auto`` on a GPU.
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
        call: function that runs the batch from host to host: name of an output in the manifest -> [batch, ...] array.
        half_precision: whether the case computes in half precision, or with weights that were rounded to it.
        precision: precision of the computation on a CPU.
        allocator_bytes: peak of PyTorch's allocator on the GPU since the process started; None elsewhere.
        engine_bytes: GPU memory that an engine and its contexts report; None elsewhere.
        missing_changes: requested changes of the model that the case runs without.
    """

    call: Callable[[], dict[str, FloatArray]]
    half_precision: bool
    precision: Precision = Precision.FLOAT32
    allocator_bytes: Callable[[], int | None] = lambda: None
    engine_bytes: Callable[[], int | None] = lambda: None
    close: Callable[[], None] = lambda: None
    missing_changes: tuple[ModelChange, ...] = ()


class Prepared(NamedTuple):
    """Artefact of a baseline, and a remark for readers of its figures."""

    artefact: Path
    remark: str | None = None


class Baseline(ABC):
    """Another way to run a model; by default the artefact is the checkpoint's directory."""

    name: ClassVar[str]
    """Name of the baseline on the command line."""

    example_tokens: ClassVar[int | None] = None
    """Tokens of the example that the model is exported with; None if the model is not exported."""

    @abstractmethod
    def unavailable(self, manifest: Manifest) -> str | None:
        """Why the baseline cannot run here or cannot run this model, with the command that installs it, or None."""

    @abstractmethod
    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the artefact of `prepare`; `inputs` are name -> [batch, tokens]."""

    def missing_changes(self, manifest: Manifest) -> tuple[ModelChange, ...]:
        """Requested changes of the model that the baseline runs without; its outputs differ from the bundle's."""
        positions = manifest.positions
        missing = {
            ModelChange.ATTENTION: any(item.record.baseline_note for item in attention_of(manifest)),
            ModelChange.POSITIONS: positions.form == "by_length",
            ModelChange.ROPE: positions.rope_factor is not None,
            ModelChange.ADAPTER: manifest.adapter is not None,
        }
        return tuple(change for change, is_missing in missing.items() if is_missing)

    def remark(self, manifest: Manifest) -> str | None:
        """Return how the baseline differs from the bundle: missing changes, or sizes that its export fixed."""
        items = attention_of(manifest)
        remarks = [item.record.baseline_note for item in items]
        positions = manifest.positions
        if positions.form == "by_length":
            remarks.append(f"interpolates positions for {manifest.max_len} tokens: outputs of shorter sequences differ")
        if positions.rope_factor is not None:
            remarks.append(f"has the checkpoint's RoPE base, not {positions.rope_factor:g} times it: outputs differ")
        if manifest.adapter is not None:
            remarks.append(f"runs without the adapter {manifest.adapter}: outputs differ")
        if not any(remarks) and self.example_tokens is not None:
            of_export = [item.record.export_note(self.example_tokens) for item in items]
            return next(filter(None, of_export), None)
        return "; ".join(filter(None, remarks)) or None

    def prepare(self, model: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Make the artefact in `folder`, which all baselines of the model share; nothing is left half-written.

        `device` is ``cpu`` or ``cuda``.
        """
        return Prepared(artefact=checkpoint_folder(model, folder))


def runs_in_half(device: str, manifest: Manifest) -> bool:
    """Whether a baseline computes in half precision: on a GPU, if the bundle does."""
    return device == "cuda" and manifest.dtype != "float32"


def staged_artefact(folder: Path, file: str) -> AbstractContextManager[Path]:
    """A directory in which `file` is made; it replaces `folder` when the block ends without an error."""
    kind = DirectoryKind(
        name="model of a baseline", marker=file, is_one=lambda directory: True, other_files=lambda directory: []
    )
    return staged_directory(folder, kind, force=True)


def not_installed(*packages: str, install: str) -> str | None:
    """Import names of missing packages with the command that installs them, or None."""
    missing = [name for name in packages if not is_installed(name)]
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {install}" if missing else None


def first_cause(error: BaseException) -> str:
    """The first error in one line: PyTorch's exporter and compiler wrap it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def checkpoint_folder(model: MeasuredModel, folder: Path) -> Path:
    """The checkpoint with extended positions, as a Hugging Face directory that is made once for all baselines.

    A checkpoint that computes its positions is used as it is. Positions that depend on the sequence length are
    interpolated for the longest sequence.
    """
    from hdexport.checkpoint.heads import task_head
    from hdexport.extend import ExtendOptions, extend

    assert model.checkpoint is not None
    checkpoint = find_checkpoint(model.checkpoint, trust=model.trust)
    manifest = open_bundle(model.bundle, check_files=False).manifest
    # Baselines load pickles and code; pickles and code that are not trusted are rejected here.
    checkpoint.weight_files()
    task_head(checkpoint, manifest.task)
    is_extended = manifest.positions.rows > manifest.positions.base
    if not checkpoint.family.learned_positions or not (is_extended or checkpoint.family.stores_table):
        return _lasting(checkpoint, folder / _FOLDER)
    output = folder / _FOLDER
    if output.exists():
        return output
    max_len, scheme, alpha = positions_of(manifest, checkpoint.family, checkpoint.config)
    if scheme not in TABLES:
        # A checkpoint's files cannot express positions by length; `Baseline.remark` says so.
        scheme = Scheme.INTERPOLATE_STATIC
    options = ExtendOptions(
        model=checkpoint.path,
        output=output,
        max_len=max_len,
        scheme=scheme,
        alpha=alpha,
        trust=model.trust,
    )
    extend(options)
    return output


def _lasting(checkpoint: Checkpoint, output: Path) -> Path:
    """The checkpoint's directory, or a copy of a converted checkpoint, which is removed when this process ends."""
    if checkpoint.path == checkpoint.origin:
        return checkpoint.path
    if not output.exists():
        shutil.copytree(checkpoint.path, output)
    return output


class Texts:
    """Batches of sequences of any length for a bundle, equal in every process.

    There is no padding. English sequences start and end with the tokenizer's special tokens.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def batch(self, batch: int, tokens: int) -> dict[str, AnyArray]:
        """Every input of the manifest, name -> [batch, tokens]; `tokens` includes special tokens."""
        return self._inputs(np.stack([self._sequence(row, tokens) for row in range(batch)]))

    def alone(self, lengths: Sequence[int]) -> list[dict[str, AnyArray]]:
        """Different sequences, one per length: every input of the manifest, name -> [1, tokens]."""
        return [self._inputs(self._sequence(row, tokens)[np.newaxis]) for row, tokens in enumerate(lengths)]

    def _inputs(self, rows: IntArray) -> dict[str, AnyArray]:
        tokens = rows.shape[1]
        # The runtime adds the other inputs: masks of ones, token types of zeros, its default of global tokens.
        manifest = self._bundle.manifest
        mask = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
        if mask is not None and mask.default.token_id is not None:
            rows[:, min(_QUESTION_TOKENS, mask.bound or _QUESTION_TOKENS, tokens - 1)] = mask.default.token_id
        # Baselines run sequences without a memory cache.
        return checked_inputs({manifest.ids: rows}, manifest, memory=manifest.min_memory)

    def _sequence(self, row: int, tokens: int) -> IntArray:
        prefix, content, suffix = self._frame
        length = max(0, tokens - len(prefix) - len(suffix))
        positions = (row * (length + 1) + np.arange(length)) % len(content)
        return np.concatenate([prefix, content[positions], suffix])[-tokens:]

    @functools.cached_property
    def _frame(self) -> tuple[IntArray, ...]:
        """Ids at the start of every sequence, ids from which its content is taken, and ids at its end."""
        (ids,), kind = sample_ids(self._bundle, [_STREAM_TOKENS])
        return (ids[:1], ids[1:-1], ids[-1:]) if kind == ENGLISH else (ids[:0], ids, ids[:0])
