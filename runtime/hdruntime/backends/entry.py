"""The interface of a backend for everything that chooses, loads, lists or checks backends."""

from __future__ import annotations

import abc
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hdruntime.backends import Runner
from hdruntime.backends.precision import BUILD_OPTIONS, Precision
from hdruntime.errors import BackendUnavailableError, Message, MissingDependencyError, write
from hdruntime.gpu.options import GpuOptions
from hdruntime.optional import is_installed

if TYPE_CHECKING:
    from hdruntime.backends.diagnostics import DiagnosticResult, ProbeResult
    from hdruntime.bundle.manifest import Backend
    from hdruntime.bundle.reader import Bundle
    from hdruntime.gpu.driver import Gpu


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """The GPU, driver and packages that decide whether a backend on a GPU runs on this machine.

    Attributes:
        gpu: the GPU to use, or None.
        driver: version of the NVIDIA driver, or None.
        versions: name of a backend on a GPU -> version of the backend's package, where the package is installed and
            reaches the GPU.
        listed_gpus: names of the GPUs that the driver lists where CUDA offers none.
    """

    gpu: Gpu | None
    driver: str | None
    versions: Mapping[str, str]
    listed_gpus: tuple[str, ...] = ()

    @property
    def no_gpu_reason(self) -> str:
        """Why there is no `gpu`, as a sentence."""
        from hdruntime.gpu.driver import no_gpu_reason

        return no_gpu_reason(self.listed_gpus)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of :func:`hdruntime.load` for a backend.

    Attributes:
        device: the backend's own name of a device; None for the backend's default device.
        machine: the machine with the GPU; None for backends that need no GPU.
    """

    threads: int | None = None
    precision: Precision = Precision.AUTO
    device: str | None = None
    gpu: GpuOptions = field(default_factory=GpuOptions)
    machine: ThisMachine | None = None

    @property
    def gpu_machine(self) -> ThisMachine:
        """The machine; only for backends that need a GPU."""
        assert self.machine is not None
        return self.machine


@dataclass(frozen=True, kw_only=True)
class UnavailableReason:
    """Why a backend cannot run a bundle on this machine.

    Attributes:
        reason: the reason, as one or more sentences.
        hint: what to do.
        is_not_installed: whether the backend's package is not installed.
        engine: file of the engine that comes closest to running; empty where no engine is concerned.
    """

    reason: str
    hint: Message
    is_not_installed: bool = False
    engine: str = ""

    def __str__(self) -> str:
        """The reason and, on a line of its own, the hint."""
        return f"{self.reason}\n{write(self.hint)}"

    @classmethod
    def from_error(cls, error: BackendUnavailableError) -> UnavailableReason:
        """The reason that an error states."""
        return cls(reason=write(error.problem), hint=error.hint)

    def error(self, backend: str, bundle: Bundle) -> BackendUnavailableError | MissingDependencyError:
        """The error of loading a bundle with the backend."""
        kind = MissingDependencyError if self.is_not_installed else BackendUnavailableError
        what = f"the engine {self.engine} of {bundle.path}" if self.engine else str(bundle.path)
        return kind(f"{backend} cannot run {what} on this machine. {self.reason}", hint=self.hint)


class Preference(NamedTuple):
    """Whether ``auto`` takes a backend on a CPU.

    Attributes:
        is_preferred: whether ``auto`` takes the backend.
        reason: the reason, as a sentence; empty to keep the reason of the previous backend.
    """

    is_preferred: bool
    reason: str


class SetupCommands(NamedTuple):
    """Shell commands after which a backend runs a bundle on this machine's GPU.

    Attributes:
        install: commands that install packages.
        rebuild: command that builds an engine; empty where no engine is needed.
    """

    install: tuple[str, ...] = ()
    rebuild: str = ""

    def __str__(self) -> str:
        """The commands as one command line; empty where nothing is to be done."""
        return " && ".join(filter(None, (*self.install, self.rebuild)))


class BackendEntry(abc.ABC):
    """One backend. Importing the class must not import the backend's library.

    A backend is a folder beside this file, whose module `backend` lists its instances in `BACKENDS`. The exporter's
    class for a backend is `hdexport.graph.targets.target.Target`.
    """

    name: ClassVar[Backend]

    library: ClassVar[str]
    """Name of the backend in sentences, such as ``ONNX Runtime``."""

    rank: ClassVar[int]
    """``auto`` tries the backends of a place, GPU or CPU, by rising rank. ``auto`` always takes the last backend on a
    CPU, of rank 1000."""

    needs_gpu: ClassVar[bool] = False
    """Whether the backend needs an NVIDIA GPU."""

    package: ClassVar[str]
    """Import name of the backend's package."""

    distributions: ClassVar[tuple[str, ...]] = ()
    """Distributions that contain the package, the usual distribution first: measurements record their versions."""

    extra: ClassVar[str | None] = None
    """The extra of hdexport that installs the package; None where no extra is needed."""

    install: ClassVar[str]
    """The command that installs the package; by default the command that installs the extra."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "extra" in vars(cls):
            cls.install = f"pip install 'hdexport[{cls.extra}]'"

    lowerings: ClassVar[tuple[str, ...]] = ()
    """Lowerings (`GraphFile.lowering`) of the graphs that the backend opens, best first; () for a backend of
    engines."""

    precisions: ClassVar[tuple[Precision, ...]] = (Precision.FLOAT32,)
    """Precisions that a session on a CPU can be asked to compute in."""

    devices: ClassVar[str] = ""
    """Names of the backend's devices beside ``cpu`` and ``cuda``, for the help of commands; empty for none."""

    @abc.abstractmethod
    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        """Load a bundle for which `unavailable_reason` is None; an option that does not fit is a BackendError."""

    def unavailable_reason(self, bundle: Bundle, options: LoadOptions) -> UnavailableReason | None:
        """Why the backend cannot run a bundle, or None. The bundle is not loaded."""
        if not self.is_installed():
            return UnavailableReason(
                reason=f"{self.library} is not installed.",
                hint=f"Install it with: {self.install}",
                is_not_installed=True,
            )
        from hdruntime.backends.bundle_runner import has_graph

        if not has_graph(bundle, self.lowerings[0]):
            command = shlex.join(["hdexport", "rebuild", str(bundle.path), "--target", self.target])
            return UnavailableReason(reason=f"The bundle has no graph for {self.library}.", hint=f"Add it: {command}")
        precision = options.precision
        if precision.has_graphs and not has_graph(bundle, self.lowerings[0], precision=precision):
            return UnavailableReason(
                reason=f"The bundle has no graph for {self.library} in {precision}.",
                hint=("Build it again with ", BUILD_OPTIONS[precision], ", or leave out the precision."),
            )
        return None

    def preference(self, bundle: Bundle, options: LoadOptions) -> Preference:
        """Whether ``auto`` takes the backend on a CPU."""
        unavailable = self.unavailable_reason(bundle, options)
        if unavailable is not None:
            return Preference(False, unavailable.reason)
        return Preference(True, f"{self.library} is installed, and the bundle has a graph for it.")

    def is_installed(self) -> bool:
        """Whether the package can be imported; the package is not imported."""
        return is_installed(self.package)

    @property
    def target(self) -> str:
        """The build target that writes the backend's files."""
        return self.name.replace("_", "-")

    # What is shown.

    probe: ClassVar[str | None] = None
    """Python code that prints a `ProbeResult` as JSON. ``hdexport doctor`` runs the code in a process of its own; None:
    no line."""

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        """The backend's line in ``hdexport doctor``; `probe` is None where the package is not installed."""
        from hdruntime.backends.diagnostics import DiagnosticResult, DiagnosticStatus

        if probe is None:
            return DiagnosticResult(self.library, DiagnosticStatus.MISSING, "not installed", self.install)
        if probe.error is not None:
            return DiagnosticResult(self.library, DiagnosticStatus.BROKEN, probe.error, self.install)
        return DiagnosticResult(self.library, DiagnosticStatus.OK, probe.version)

    # Backends on a GPU.

    variant: ClassVar[str | None] = None
    """TensorRT variant (`EngineFile.variant`) of the engines that the backend opens; None for a backend of graphs."""

    is_advised: ClassVar[bool] = True
    """Whether messages list the backend among the ways to use a GPU."""

    def version(self, *, has_gpu: bool) -> str | None:
        """Version of the package, where the package is installed and reaches the GPU."""
        return None

    def is_built_into(self, bundle: Bundle) -> bool:
        """Whether a bundle has a graph or an engine for the backend, so that ``auto`` tries the backend on a GPU."""
        return self.variant is None or any(engine.variant == self.variant for engine in bundle.manifest.engines)

    def setup_commands(self, bundle: Bundle, machine: ThisMachine) -> SetupCommands | None:
        """Commands after which the backend runs on this machine's GPU, or comes closer; None where the backend never
        runs on such a GPU."""
        return SetupCommands() if self.name in machine.versions else SetupCommands((self.install,))

    def builds_for(self, architecture: str) -> bool:
        """Whether engines for the backend can be built for GPUs of an architecture, for example ``sm90``."""
        return False

    def has_builder(self, machine: ThisMachine) -> bool:
        """Whether the package that builds the backend's engines is installed."""
        return False

    def rebuild_command(self, bundle: Bundle, machine: ThisMachine) -> list[str]:
        """The command that builds the backend's engine on this machine."""
        return ["hdexport", "rebuild", str(bundle.path), "--target", self.target]


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, which compare as versions do."""
    return tuple(map(int, re.findall(r"\d+", version)))
