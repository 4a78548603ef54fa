"""What a backend says of itself. Whoever chooses, loads, lists or checks backends asks this and names none."""

from __future__ import annotations

import abc
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hdruntime.backends.precision import OPTION_OF_GRAPHS, Precision
from hdruntime.gpu.options import GpuOptions
from hdruntime.optional import is_installed

if TYPE_CHECKING:
    from hdruntime.backends import Runner
    from hdruntime.backends.findings import Finding, Probed
    from hdruntime.bundle.manifest import Backend
    from hdruntime.bundle.reader import Bundle
    from hdruntime.gpu.driver import Gpu


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """What decides whether a backend on a GPU runs here; `gpu` is the one that is used.

    Attributes:
        driver: version of the NVIDIA driver, None without one.
        versions: name of a backend on a GPU -> version of its package, where that is installed and reaches the GPU.
        listed_gpus: names of the GPUs that the driver lists where CUDA offers none.
    """

    gpu: Gpu | None
    driver: str | None
    versions: Mapping[str, str]
    listed_gpus: tuple[str, ...] = ()

    @property
    def why_no_gpu(self) -> str:
        """Why there is no `gpu`."""
        from hdruntime.gpu.driver import why_no_gpu

        return why_no_gpu(self.listed_gpus)


class Asked(NamedTuple):
    """What a bundle is loaded with, as of :func:`hdruntime.load`.

    Attributes:
        device: the backend's own name of a device; None for its usual one.
        machine: where it is to run; None for backends that need no GPU.
    """

    threads: int | None = None
    precision: Precision = Precision.AUTO
    device: str | None = None
    gpu: GpuOptions = GpuOptions()
    machine: ThisMachine | None = None

    @property
    def on(self) -> ThisMachine:
        """The machine, of a backend that needs a GPU."""
        assert self.machine is not None
        return self.machine


class Refusal(NamedTuple):
    """Why a backend cannot run a bundle here.

    Attributes:
        reason: half a sentence.
        advice: what to do; None for the commands of `BackendEntry.steps`.
        is_missing: whether the backend's package is not installed.
        what: what cannot run; None for the backend with the bundle.
    """

    reason: str
    advice: str | None = None
    is_missing: bool = False
    what: str | None = None


class BackendEntry(abc.ABC):
    """One backend. Importing it must not import its library.

    A backend is a folder beside this file, whose module `backend` lists its instances in `BACKENDS`. The exporter's
    class for a backend is `hdexport.graph.targets.target.Target`.
    """

    name: ClassVar[Backend]

    library: ClassVar[str]
    """Its name in sentences."""

    rank: ClassVar[int]
    """``auto`` tries the backends of a place, GPU or CPU, by rising rank; the last on a CPU, of rank 1000, is always
    taken."""

    needs_gpu: ClassVar[bool] = False
    """Whether it needs an NVIDIA GPU."""

    package: ClassVar[str]
    """Import name of its library."""

    distributions: ClassVar[tuple[str, ...]] = ()
    """That have the package, the usual one first: their versions stand beside measurements."""

    extra: ClassVar[str | None] = None
    """The extra of hdexport that brings its library; None where it needs none, or another package brings it."""

    install: ClassVar[str]
    """The command that installs it; by default that of the extra."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "extra" in vars(cls):
            cls.install = f"pip install 'hdexport[{cls.extra}]'"

    lowerings: ClassVar[tuple[str, ...]] = ()
    """The graphs that it opens, as `GraphFile.lowering` names them, best first; () where it opens engines."""

    precisions: ClassVar[tuple[Precision, ...]] = (Precision.FLOAT32,)
    """That a session can be asked to compute in, on a CPU."""

    devices: ClassVar[str] = ""
    """The names of devices that it takes beside ``cpu`` and ``cuda``, for the command's help; empty for none."""

    @abc.abstractmethod
    def open(self, bundle: Bundle, asked: Asked) -> Runner:
        """Load a bundle that nothing speaks against; what was asked for and does not fit raises BackendError."""

    def against(self, bundle: Bundle, asked: Asked) -> Refusal | None:
        """What speaks against the backend for a bundle, without loading it; None for nothing."""
        if not self.is_installed():
            return Refusal(f"{self.library} is not installed here", f"Install it with: {self.install}", is_missing=True)
        from hdruntime.backends.bundle_runner import has_graph

        if not has_graph(bundle, self.lowerings[0]):
            command = shlex.join(["hdexport", "rebuild", str(bundle.path), "--target", self.target])
            return Refusal(f"the bundle has no graph for {self.library}", f"Add it: {command}")
        precision = asked.precision
        if precision.has_graphs and not has_graph(bundle, self.lowerings[0], precision=precision):
            reason = f"the bundle has no graph for {self.library} in {precision}"
            return Refusal(reason, f"Build it again with {OPTION_OF_GRAPHS[precision]}, or leave out the precision.")
        return None

    def why_unavailable(self, bundle: Bundle, asked: Asked) -> str | None:
        """Why it cannot load a bundle that `against` lets pass, as far as that is cheap to know; None if it can."""
        return None

    def preference(self, bundle: Bundle, asked: Asked) -> tuple[bool, str]:
        """Whether ``auto`` takes it on a CPU, and why; an empty reason keeps that of the backend before."""
        refusal = self.against(bundle, asked)
        if refusal is not None:
            return False, refusal.reason
        return True, f"{self.library} is installed, and the bundle has its graph"

    def is_installed(self) -> bool:
        """Whether its library can be imported; it is not imported."""
        return is_installed(self.package)

    @property
    def target(self) -> str:
        """The value of ``--target`` that builds what it opens."""
        return self.name.replace("_", "-")

    # What is shown.

    probe: ClassVar[str | None] = None
    """Python code that prints a `Probed` as JSON, run by ``hdexport doctor`` in a process of its own; None: no line."""

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """Its line in ``hdexport doctor``; `loaded` is None where its library is not installed."""
        from hdruntime.backends.findings import Finding, FindingStatus

        if loaded is None:
            return Finding(self.library, FindingStatus.MISSING, "not installed", self.install)
        if loaded.error is not None:
            return Finding(self.library, FindingStatus.BROKEN, loaded.error, self.install)
        return Finding(self.library, FindingStatus.OK, loaded.version)

    # Backends on a GPU.

    variant: ClassVar[str | None] = None
    """Of the engines that it opens, as `EngineFile.variant` names them; None where it opens graphs."""

    is_advised: ClassVar[bool] = True
    """Whether it is among the ways to use a GPU that a message lists."""

    def version(self, *, has_gpu: bool) -> str | None:
        """Version of its package, where that is installed and reaches the GPU."""
        return None

    def is_built_into(self, bundle: Bundle) -> bool:
        """Whether a bundle has something for it, so that ``auto`` tries it on a GPU."""
        return self.variant is None or any(engine.variant == self.variant for engine in bundle.manifest.engines)

    def steps(self, bundle: Bundle, machine: ThisMachine) -> list[str] | None:
        """Commands after which it gets further on this machine's GPU; None where it never runs on such a GPU."""
        return [] if self.name in machine.versions else [self.install]

    def builds_for(self, architecture: str) -> bool:
        """Whether engines for it can be built for GPUs of an architecture, for example ``sm90``."""
        return False

    def has_builder(self, machine: ThisMachine) -> bool:
        """Whether what builds its engines is installed."""
        return False

    def rebuild_command(self, bundle: Bundle, machine: ThisMachine) -> list[str]:
        """The command that builds its engine on this machine."""
        return ["hdexport", "rebuild", str(bundle.path), "--target", self.target]


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, which compare as versions do."""
    return tuple(map(int, re.findall(r"\d+", version)))
