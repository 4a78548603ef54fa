"""What TensorRT, TensorRT-RTX and TensorRT's lean runtime say of themselves: they open a bundle's engines."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from typing import TYPE_CHECKING, ClassVar

from hdruntime.backends.entry import Asked, BackendEntry, Refusal, ThisMachine, version_numbers
from hdruntime.backends.findings import IMPORT, Finding, FindingStatus, Probed
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import installed_version

if TYPE_CHECKING:
    from hdruntime.backends import Runner
    from hdruntime.bundle.manifest import EngineFile
    from hdruntime.bundle.reader import Bundle
    from hdruntime.gpu.driver import Gpu

logger = logging.getLogger(__name__)

RTX_ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
"""GPU architectures that TensorRT-RTX (1.7) builds for: GeForce, RTX and A100, but neither Hopper nor B200."""

RTX_ON_REQUEST = ("sm75",)
"""Architectures that TensorRT-RTX leaves out unless asked: they slow an engine down on the others."""

_OLDEST_OF_TENSORRT = 75
"""Number of the oldest GPU architecture that TensorRT 10 and 11 support, Turing."""


class EngineBackend(BackendEntry):
    """A variant of TensorRT, which opens the engines that the same variant has built."""

    needs_gpu = True
    in_text: ClassVar[str]
    """Its name in sentences about engines."""

    probe = IMPORT

    builds: ClassVar[bool] = True
    """Whether it builds engines, and does not only run them."""

    def against(self, bundle: Bundle, asked: Asked) -> Refusal | None:
        """What speaks against the engine that the least speaks against."""
        engine, reasons = self._best_engine(bundle, asked.on)
        what = None if engine is None else f"The engine {engine.file} of {bundle.path}"
        return Refusal("; ".join(reasons), what=what) if reasons else None

    def open(self, bundle: Bundle, asked: Asked) -> Runner:
        """Load the engine that runs here."""
        limit_bytes = asked.gpu.memory_limit_bytes
        if limit_bytes is not None:
            raise BackendUnavailableError(
                f"{self.name} holds no memory_limit_bytes ({limit_bytes}): an engine's memory was planned when "
                "it was built.",
                hint="Leave it out, or use the backend onnxruntime_cuda.",
            )
        from hdruntime.backends.tensorrt import runner
        from hdruntime.backends.tensorrt.engine_metadata import older_driver, read_engine_metadata

        engine, _ = self._best_engine(bundle, asked.on)
        assert engine is not None
        remark = older_driver(read_engine_metadata(bundle, engine), asked.on)
        if remark is not None:
            logger.warning("%s: %s", engine.file, remark)
        return runner.TensorRtRunner(bundle, engine, backend=self.name, gpu=asked.gpu)

    def differences(self, engine: EngineFile, machine: ThisMachine) -> tuple[str, ...]:
        """Why it cannot run an engine of its variant on a machine; () if it can."""
        reasons = []
        if machine.driver is None:
            reasons.append("there is no NVIDIA driver here")
        if machine.gpu is None:
            reasons.append(machine.why_no_gpu)
        elif machine.gpu.architecture not in engine.architectures:
            reasons.append(
                f"it is for GPUs of {', '.join(engine.architectures)}, and this one ({machine.gpu.name}) is "
                f"{machine.gpu.architecture}"
            )
        return (*reasons, *self._version_difference(engine, machine.versions.get(self.name)))

    def version(self, *, has_gpu: bool) -> str | None:
        """By the distributions; each comes with ``..._bindings``, which may be alone."""
        asked = (distribution for name in self.distributions for distribution in (name, f"{name}-bindings"))
        return next(filter(None, map(installed_version, asked)), None)

    def builds_for(self, architecture: str) -> bool:
        """TensorRT for Turing and all since."""
        return int(architecture.removeprefix("sm")) >= _OLDEST_OF_TENSORRT

    def has_builder(self, machine: ThisMachine) -> bool:
        """Whether it is installed itself."""
        return self.name in machine.versions

    def steps(self, bundle: Bundle, machine: ThisMachine) -> list[str] | None:
        """Install it, build an engine that fits, or both."""
        assert machine.gpu is not None
        install = [] if self.name in machine.versions else [self.install]
        if not self.builds_for(machine.gpu.architecture):
            return None
        engine, reasons = self._best_engine(bundle, machine)
        fits = engine is not None and machine.gpu.architecture in engine.architectures
        if not reasons or (install and fits):
            return install
        return [*install, shlex.join(self.rebuild_command(bundle, machine))]

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """With what building and running need."""
        if gpu is not None and not self.builds_for(gpu.architecture):
            limit = f"it supports no GPU of {gpu.architecture}"
            if loaded is None:
                return Finding(self.library, FindingStatus.INFO, f"not installed; {limit}")
        else:
            limit = None
        if loaded is None or loaded.error is not None:
            return super().finding(loaded, gpu)
        if self.builds and installed_version("polygraphy") is None:
            detail = f"{loaded.version}; building engines needs polygraphy"
            return Finding(self.library, FindingStatus.MISSING, detail, self.install)
        if limit is not None:
            return Finding(self.library, FindingStatus.INFO, f"{loaded.version}; {limit}")
        return super().finding(loaded, gpu)

    def _best_engine(self, bundle: Bundle, machine: ThisMachine) -> tuple[EngineFile | None, tuple[str, ...]]:
        """The engine with the fewest reasons against it, and these reasons."""
        engines = [engine for engine in bundle.manifest.engines if engine.variant == self.variant]
        if not engines:
            return None, (f"the bundle has no {self.variant} engine",)
        reasons = {engine: self.differences(engine, machine) for engine in engines}
        best = min(engines, key=lambda engine: len(reasons[engine]))
        return best, reasons[best]

    def _version_difference(self, engine: EngineFile, here: str | None) -> list[str]:
        if here is None:
            return [f"{self.in_text} ({self.name}) is not installed here"]
        if not self.builds and not engine.version_compatible:
            return [
                f"{self.in_text} runs version-compatible engines only, and it was not built with --version-compatible"
            ]
        if engine.version_compatible and version_numbers(here) < version_numbers(engine.version):
            built_by = next(entry.in_text for entry in BACKENDS if entry.name == engine.variant)
            return [f"it was built by {built_by} {engine.version}, and {here} here is older"]
        if not engine.version_compatible and here != engine.version:
            return [f"it was built by {self.in_text} {engine.version}, and {here} is installed here"]
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

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """It is of no use without a GPU."""
        if loaded is None and gpu is None:
            return Finding(self.library, FindingStatus.INFO, "not installed; it needs a GPU")
        return super().finding(loaded, gpu)


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
        """Names an architecture that is left out unless asked for."""
        command = super().rebuild_command(bundle, machine)
        assert machine.gpu is not None
        if machine.gpu.architecture in RTX_ON_REQUEST:
            command += ["--sm", machine.gpu.architecture.removeprefix("sm")]
        return command

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """It is of use without a GPU."""
        found = super().finding(loaded, gpu)
        if found.status is FindingStatus.OK and gpu is None:
            detail = f"{found.detail}: builds engines here, running them needs a GPU"
            return Finding(self.library, FindingStatus.OK, detail)
        return found


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
        """Whether TensorRT is installed."""
        return Backend.TENSORRT in machine.versions

    def steps(self, bundle: Bundle, machine: ThisMachine) -> list[str] | None:
        """TensorRT is installed for a rebuild."""
        steps = super().steps(bundle, machine)
        if not steps or not steps[-1].startswith("hdexport"):
            return steps
        builder = machine.versions.get(Backend.TENSORRT)
        if builder is None:
            steps.insert(-1, TensorRtBackend.install)
        elif len(steps) == 1 and version_numbers(machine.versions[self.name]) < version_numbers(builder):
            # An engine that TensorRT builds here, an older lean runtime does not run.
            return [f"pip install -U 'hdexport[{self.extra}]'"]
        return steps

    def rebuild_command(self, bundle: Bundle, machine: ThisMachine) -> list[str]:
        """Asks for an engine that it can run."""
        return [*super().rebuild_command(bundle, machine), "--version-compatible"]

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """Only bundles with version-compatible engines need it."""
        found = super().finding(loaded, gpu)
        return found if loaded is not None else dataclasses.replace(found, status=FindingStatus.INFO)


BACKENDS: tuple[EngineBackend, ...] = (TensorRtBackend(), TensorRtRtxBackend(), TensorRtLeanBackend())
