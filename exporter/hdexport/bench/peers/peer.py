"""A peer: another library's way to run a bundle's model, and the checkpoint's folder that it loads."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hdexport.attention.kinds import attention_of
from hdexport.bench.measure.case import CaseSpec, MeasuredModel
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.optional import is_installed

if TYPE_CHECKING:
    from hdexport.checkpoint import Checkpoint

Inputs = Mapping[str, npt.NDArray[Any]]

_FOLDER = "checkpoint"


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

    call: Callable[[], dict[str, npt.NDArray[np.float32]]]
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
