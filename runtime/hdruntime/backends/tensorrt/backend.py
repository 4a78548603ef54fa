"""The backends of a bundle's engines: TensorRT, TensorRT-RTX and TensorRT's lean runtime."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from typing import TYPE_CHECKING, ClassVar

from hdruntime.backends import Runner
from hdruntime.backends.diagnostics import IMPORT, DiagnosticResult, DiagnosticStatus, ProbeResult
from hdruntime.backends.entry import (
    BackendEntry,
    LoadOptions,
    SetupCommands,
    ThisMachine,
    UnavailableReason,
    version_numbers,
)
from hdruntime.backends.rebuilding import gpu_hint
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import installed_version

if TYPE_CHECKING:
    from hdruntime.gpu.driver import Gpu

logger = logging.getLogger(__name__)

RTX_ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
"""GPU architectures that TensorRT-RTX (1.7) builds for: GeForce, RTX and A100, but neither Hopper nor B200."""

RTX_ON_REQUEST = ("sm75",)
"""Architectures that TensorRT-RTX leaves out unless asked: they slow an engine down on the others."""

_OLDEST_OF_TENSORRT = 75
"""Number of the oldest GPU architecture that TensorRT 10 and 11 support, Turing."""


class EngineBackend(BackendEntry):
    """A TensorRT variant, which opens the engines that the variant has built."""

    needs_gpu = True
    in_text: ClassVar[str]
    """Name of the variant in sentences about engines."""

    probe = IMPORT

    builds: ClassVar[bool] = True
    """Whether the package builds engines; TensorRT's lean runtime only runs them."""

    def unavailable_reason(self, bundle: Bundle, options: LoadOptions) -> UnavailableReason | None:
        """Why no engine runs: the differences between this machine and the engine that comes closest."""
        machine = options.gpu_machine
        engine, reasons = self._best_engine(bundle, machine)
        if not reasons:
            return None
        return UnavailableReason(
            reason=" ".join(reasons),
            hint=gpu_hint(self, bundle, machine),
            engine="" if engine is None else engine.file,
        )

    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        limit_bytes = options.gpu.memory_limit_bytes
        if limit_bytes is not None:
            raise BackendUnavailableError(
                f"{self.name} takes no memory_limit_bytes ({limit_bytes}): the memory of an engine is planned when the "
                "engine is built.",
                hint="Leave it out, or use the backend onnxruntime_cuda.",
            )
        from hdruntime.backends.tensorrt import runner
        from hdruntime.backends.tensorrt.engine_metadata import older_driver, read_engine_metadata

        engine, _ = self._best_engine(bundle, options.gpu_machine)
        assert engine is not None
        note = older_driver(read_engine_metadata(bundle, engine), options.gpu_machine)
        if note is not None:
            logger.warning("%s: %s", engine.file, note)
        return runner.TensorRtRunner(bundle, engine, backend=self.name, gpu=options.gpu)

    def differences(self, engine: EngineFile, machine: ThisMachine) -> tuple[str, ...]:
        """Sentences that say why the backend cannot run an engine of its variant on a machine; () if it can."""
        reasons = []
        if machine.driver is None:
            reasons.append("There is no NVIDIA driver.")
        if machine.gpu is None:
            reasons.append(machine.no_gpu_reason)
        elif machine.gpu.architecture not in engine.architectures:
            reasons.append(
                f"The engine was built for GPUs of {', '.join(engine.architectures)}; this GPU ({machine.gpu.name}) is "
                f"{machine.gpu.architecture}."
            )
        return (*reasons, *self._version_difference(engine, machine.versions.get(self.name)))

    def version(self, *, has_gpu: bool) -> str | None:
        """Version of the installed distribution; only its ``...-bindings`` may be installed."""
        names = (distribution for name in self.distributions for distribution in (name, f"{name}-bindings"))
        return next(filter(None, map(installed_version, names)), None)

    def builds_for(self, architecture: str) -> bool:
        """TensorRT builds for Turing and later."""
        return int(architecture.removeprefix("sm")) >= _OLDEST_OF_TENSORRT

    def has_builder(self, machine: ThisMachine) -> bool:
        return self.name in machine.versions

    def setup_commands(self, bundle: Bundle, machine: ThisMachine) -> SetupCommands | None:
        assert machine.gpu is not None
        install = () if self.name in machine.versions else (self.install,)
        if not self.builds_for(machine.gpu.architecture):
            return None
        engine, reasons = self._best_engine(bundle, machine)
        fits = engine is not None and machine.gpu.architecture in engine.architectures
        if not reasons or (install and fits):
            return SetupCommands(install)
        return SetupCommands(install, shlex.join(self.rebuild_command(bundle, machine)))

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        """The diagnosis, with the packages that building needs."""
        if gpu is not None and not self.builds_for(gpu.architecture):
            limit = f"it supports no GPU of {gpu.architecture}"
            if probe is None:
                return DiagnosticResult(self.library, DiagnosticStatus.INFO, f"not installed; {limit}")
        else:
            limit = None
        if probe is None or probe.error is not None:
            return super().diagnose(probe, gpu)
        if self.builds and installed_version("polygraphy") is None:
            detail = f"{probe.version}; building engines needs polygraphy"
            return DiagnosticResult(self.library, DiagnosticStatus.MISSING, detail, self.install)
        if limit is not None:
            return DiagnosticResult(self.library, DiagnosticStatus.INFO, f"{probe.version}; {limit}")
        return super().diagnose(probe, gpu)

    def _best_engine(self, bundle: Bundle, machine: ThisMachine) -> tuple[EngineFile | None, tuple[str, ...]]:
        """The engine with the fewest reasons why it cannot run, and the reasons."""
        engines = [engine for engine in bundle.manifest.engines if engine.variant == self.variant]
        if not engines:
            return None, (f"The bundle has no {self.variant} engine.",)
        reasons = {engine: self.differences(engine, machine) for engine in engines}
        best = min(engines, key=lambda engine: len(reasons[engine]))
        return best, reasons[best]

    def _version_difference(self, engine: EngineFile, installed: str | None) -> list[str]:
        if installed is None:
            return [f"{self.in_text} ({self.name}) is not installed."]
        if not self.builds and not engine.version_compatible:
            return [f"{self.in_text} runs version-compatible engines only, and the engine is not version-compatible."]
        if engine.version_compatible and version_numbers(installed) < version_numbers(engine.version):
            built_by = next(entry.in_text for entry in BACKENDS if entry.name == engine.variant)
            return [f"The engine was built by {built_by} {engine.version}; the installed version {installed} is older."]
        if not engine.version_compatible and installed != engine.version:
            return [f"The engine was built by {self.in_text} {engine.version}; the installed version is {installed}."]
        return []


class TensorRtBackend(EngineBackend):
    """TensorRT, which builds engines on the GPU that they are for."""

    name = Backend.TENSORRT
    variant = "tensorrt"
    library = in_text = "TensorRT"
    rank = 10
    package = "tensorrt"
    extra = "tensorrt"
    distributions = ("tensorrt-cu13", "tensorrt-cu12", "tensorrt")

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        if probe is None and gpu is None:
            return DiagnosticResult(self.library, DiagnosticStatus.INFO, "not installed; it needs a GPU")
        return super().diagnose(probe, gpu)


class TensorRtRtxBackend(EngineBackend):
    """TensorRT-RTX, which builds engines without a GPU."""

    name = Backend.TENSORRT_RTX
    variant = "tensorrt_rtx"
    library = in_text = "TensorRT-RTX"
    rank = 20
    package = "tensorrt_rtx"
    extra = "rtx"
    distributions = ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx")

    def builds_for(self, architecture: str) -> bool:
        """GeForce, RTX and A100."""
        return architecture in RTX_ARCHITECTURES

    def rebuild_command(self, bundle: Bundle, machine: ThisMachine) -> list[str]:
        """Names an architecture that TensorRT-RTX builds only on request."""
        command = super().rebuild_command(bundle, machine)
        assert machine.gpu is not None
        if machine.gpu.architecture in RTX_ON_REQUEST:
            command += ["--sm", machine.gpu.architecture.removeprefix("sm")]
        return command

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        result = super().diagnose(probe, gpu)
        if result.status is DiagnosticStatus.OK and gpu is None:
            detail = f"{result.detail}; it builds engines without a GPU and needs a GPU to run them"
            return DiagnosticResult(self.library, DiagnosticStatus.OK, detail)
        return result


class TensorRtLeanBackend(EngineBackend):
    """TensorRT's lean runtime, which runs version-compatible engines of TensorRT and builds none."""

    name = Backend.TENSORRT_LEAN
    variant = "tensorrt"
    library = "TensorRT lean runtime"
    in_text = "TensorRT's lean runtime"
    rank = 30
    package = "tensorrt_lean"
    extra = "lean"
    distributions = ("tensorrt-lean-cu13", "tensorrt-lean-cu12", "tensorrt-lean")
    target = "tensorrt"
    builds = False
    is_advised = False

    def has_builder(self, machine: ThisMachine) -> bool:
        return Backend.TENSORRT in machine.versions

    def setup_commands(self, bundle: Bundle, machine: ThisMachine) -> SetupCommands | None:
        commands = super().setup_commands(bundle, machine)
        if commands is None or not commands.rebuild:
            return commands
        builder = machine.versions.get(Backend.TENSORRT)
        if builder is None:
            return commands._replace(install=(*commands.install, TensorRtBackend.install))
        if not commands.install and version_numbers(machine.versions[self.name]) < version_numbers(builder):
            # An older lean runtime does not run an engine that TensorRT builds here.
            return SetupCommands((f"pip install -U 'hdexport[{self.extra}]'",))
        return commands

    def rebuild_command(self, bundle: Bundle, machine: ThisMachine) -> list[str]:
        return [*super().rebuild_command(bundle, machine), "--version-compatible"]

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        """Only bundles with version-compatible engines need the lean runtime."""
        result = super().diagnose(probe, gpu)
        return result if probe is not None else dataclasses.replace(result, status=DiagnosticStatus.INFO)


BACKENDS: tuple[EngineBackend, ...] = (TensorRtBackend(), TensorRtRtxBackend(), TensorRtLeanBackend())
