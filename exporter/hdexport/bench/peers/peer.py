"""A peer: whether it can run a model here, the artefact that it needs for that, and its open form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hdexport.attention.kinds import attention_of
from hdexport.bench.measure.case import CaseSpec, MeasuredModel
from hdexport.bench.peers.checkpoint_folder import checkpoint_folder
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.optional import is_installed

Inputs = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class OpenCase:
    """A case that is ready to run.

    Attributes:
        call: runs its batch, from the host to the host: name of an output of the manifest -> [batch, ...] array.
        half_precision: whether it computes in half precision, or with weights that were rounded to it.
        precision: the precision that it computes in on a CPU.
        allocator_bytes: peak of PyTorch's allocator on the GPU since the process began; None elsewhere.
        engine_bytes: memory that TensorRT's engine and contexts take on the GPU now, by its own report; None elsewhere.
        close: gives memory back.
    """

    call: Callable[[], dict[str, npt.NDArray[np.float32]]]
    half_precision: bool
    precision: Precision = Precision.FLOAT32
    allocator_bytes: Callable[[], int | None] = lambda: None
    engine_bytes: Callable[[], int | None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of a peer's preparation: for `CaseSpec.artefact`, and for readers."""

    artefact: Path
    remark: str | None = None


class Peer(ABC):
    """Another library's way to run a model; by default it loads the checkpoint in PyTorch."""

    name: ClassVar[str]
    """The peer's name on the command line."""

    example_tokens: ClassVar[int | None] = None
    """Tokens of the texts that the model is exported with; None where it is not exported."""

    @abstractmethod
    def unavailable(self, manifest: Manifest) -> str | None:
        """Why it cannot run here, or not this model, with the command that installs it; None if it can."""

    @abstractmethod
    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the artefact of :meth:`prepare`.

        Args:
            manifest: of the bundle whose model it is.
            inputs: name -> [batch, tokens].

        Raises:
            HdexportError: the artefact cannot be loaded.
        """

    def remark(self, manifest: Manifest) -> str | None:
        """The parts of the bundle's computation that it does not know, or else that its export lacks; None for none."""
        items = attention_of(manifest)
        remarks = [item.kind.peer_remark(item.record) for item in items]
        positions = manifest.positions
        if positions.form == "by_length":
            remarks.append(f"stretches positions for {manifest.max_len} tokens: its answers to shorter texts differ")
        if positions.rope_factor is not None:
            remarks.append(f"has the checkpoint's rotary base, not {positions.rope_factor:g} times it: answers differ")
        if manifest.adapter is not None:
            remarks.append(f"runs without the adapter {manifest.adapter}: answers differ")
        if not any(remarks) and self.example_tokens is not None:
            of_export = [item.kind.export_remark(item.record, self.example_tokens) for item in items]
            return next(filter(None, of_export), None)
        return "; ".join(filter(None, remarks)) or None

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Make the artefact: here, the checkpoint with the bundle's positions.

        Args:
            folder: where to; it also holds files of other peers for the same subject, which are shared.
            device: ``cpu`` or ``cuda``.

        Raises:
            HdexportError: the artefact could not be made; nothing is left half-written.
        """
        return Prepared(artefact=checkpoint_folder(subject, folder))


def runs_in_half(device: str, manifest: Manifest) -> bool:
    """Whether a peer computes in half precision: on a GPU (``cuda``), where the bundle does."""
    return device == "cuda" and manifest.dtype != "float32"


def staged_artefact(folder: Path, file: str) -> AbstractContextManager[Path]:
    """A directory to make a file in, which takes the place of `folder` when the block ends cleanly."""
    kind = DirectoryKind(
        name="peer's model", marker=file, is_one=lambda directory: True, foreign_files=lambda directory: []
    )
    return staged_directory(folder, kind, force=True)


def not_installed(*packages: str, install: str) -> str | None:
    """Which packages are missing, with the command that installs them; None where all are installed.

    Args:
        packages: import names; nothing is imported.
    """
    missing = [name for name in packages if not is_installed(name)]
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {install}" if missing else None


def first_cause(error: BaseException) -> str:
    """The first error, in a line: PyTorch's exporter and compiler wrap it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
