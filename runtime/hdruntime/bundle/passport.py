"""An engine's passport: its kind, source and place of build; and whether it runs on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from hdruntime.bundle.checked_json import from_json
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CUDA_PROVIDER, TENSORRT_RTX_ARCHITECTURES
from hdruntime.errors import BundleCorruptError
from hdruntime.gpu.driver import Gpu, driver_version, gpus, listed_gpus, why_no_gpu

_NAMES = {
    Backend.TENSORRT: "TensorRT",
    Backend.TENSORRT_RTX: "TensorRT-RTX",
    Backend.TENSORRT_LEAN: "TensorRT's lean runtime",
}

_DISTRIBUTIONS = {
    Backend.TENSORRT: ("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    Backend.TENSORRT_RTX: ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    Backend.TENSORRT_LEAN: ("tensorrt-lean-cu13", "tensorrt-lean-cu12", "tensorrt-lean"),
}
"""Distributions of a flavour's module, newest CUDA first; each comes with ``..._bindings``, which may be alone."""

_OLDEST_OF_TENSORRT = 75
"""Number of the oldest GPU architecture that TensorRT 10 and 11 support, Turing."""


@dataclass(frozen=True, kw_only=True)
class BuiltOn:
    """The machine that built an engine; ``driver`` and ``gpu`` are None if missing."""

    platform: str
    driver: str | None
    gpu: str | None
    date: str


@dataclass(frozen=True, kw_only=True)
class Passport:
    """The facts of an engine that its passport says and the manifest does not.

    Attributes:
        plugins: operators that the runtime must provide -> layers of each.
        engine_sha256: of the engine itself.
        onnx_sha256: SHA-256 of each file of the graph it was built from, by name.
        built_on: the machine that built it.
    """

    plugins: dict[str, int]
    engine_sha256: str
    onnx_sha256: dict[str, str]
    built_on: BuiltOn


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """The machine's facts that an engine has to agree with.

    Attributes:
        gpu: the GPU that is used; None without one.
        driver: version of the NVIDIA driver, None without one.
        versions: backend on a GPU -> version of its package, if it is installed; ONNX Runtime's version
            only if it was built with CUDA.
        listed_gpus: names of the GPUs that the driver lists where CUDA offers none.
    """

    gpu: Gpu | None
    driver: str | None
    versions: Mapping[Backend, str]
    listed_gpus: tuple[str, ...] = ()

    @property
    def why_no_gpu(self) -> str:
        """Why there is no `gpu`."""
        return why_no_gpu(self.listed_gpus)


def this_machine(device: int = 0) -> ThisMachine:
    """Look at the GPU, the driver and the installed packages; with a GPU, ONNX Runtime is imported.

    Args:
        device: number of the GPU among CUDA's.
    """
    offered = gpus()
    found = offered[device:]
    versions = {backend: _installed_version(names) for backend, names in _DISTRIBUTIONS.items()}
    if found:
        versions[Backend.ONNXRUNTIME_CUDA] = _version_with_cuda()
    return ThisMachine(
        gpu=found[0] if found else None,
        driver=driver_version(),
        versions={backend: version for backend, version in versions.items() if version is not None},
        listed_gpus=() if offered else listed_gpus(),
    )


def builds_for(flavour: Backend, architecture: str) -> bool:
    """Whether a flavour of TensorRT builds engines for GPUs of an architecture.

    Args:
        flavour: ``Backend.TENSORRT`` or ``Backend.TENSORRT_RTX``.
        architecture: e.g. ``sm90``.
    """
    if flavour is Backend.TENSORRT_RTX:
        return architecture in TENSORRT_RTX_ARCHITECTURES
    return int(architecture.removeprefix("sm")) >= _OLDEST_OF_TENSORRT


def differences(engine: EngineFile, backend: Backend, machine: ThisMachine) -> tuple[str, ...]:
    """Why a backend cannot run an engine on a machine: its reasons, () if it can.

    Args:
        engine: as the manifest lists it.
        backend: one that runs engines of its flavour.
        machine: to run it on.
    """
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
    reasons += _version_difference(engine, backend, machine.versions.get(backend))
    return tuple(reasons)


def older_driver(passport: Passport, machine: ThisMachine) -> str | None:
    """A remark if the driver is older than the one that the engine was built with, which may or may not matter."""
    built_with = passport.built_on.driver
    if built_with is None or machine.driver is None or version_numbers(machine.driver) >= version_numbers(built_with):
        return None
    return f"the driver here ({machine.driver}) is older than the one that it was built with ({built_with})"


def read_passport(bundle: Bundle, engine: EngineFile) -> Passport:
    """The facts that the passport beside an engine adds to the manifest.

    Raises:
        BundleCorruptError: the passport is not JSON, or lacks a key that this version needs.
    """
    path = bundle.file(engine.passport)
    try:
        return from_json(path.read_bytes(), Passport, name="passport")
    except (OSError, ValueError) as error:
        raise BundleCorruptError(f"The passport {path} cannot be read: {error}.\nRebuild the bundle.") from None


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, which compare as versions do."""
    return tuple(map(int, re.findall(r"\d+", version)))


def _version_difference(engine: EngineFile, backend: Backend, here: str | None) -> list[str]:
    name = _NAMES[backend]
    if here is None:
        return [f"{name} ({backend.value}) is not installed here"]
    if backend is Backend.TENSORRT_LEAN and not engine.version_compatible:
        return [f"{name} runs version-compatible engines only, and it was not built with --version-compatible"]
    if engine.version_compatible and version_numbers(here) < version_numbers(engine.version):
        return [f"it was built by {_NAMES[Backend(engine.flavour)]} {engine.version}, and {here} here is older"]
    if not engine.version_compatible and here != engine.version:
        return [f"it was built by {name} {engine.version}, and {here} is installed here"]
    return []


def _version_with_cuda() -> str | None:
    """ONNX Runtime's version, by the module: the package installed later overwrites the files of the other."""
    try:
        import onnxruntime
    except ImportError:
        # Broken or not installed: engines still run.
        return None
    return onnxruntime.__version__ if CUDA_PROVIDER in onnxruntime.get_available_providers() else None


def _installed_version(names: Sequence[str]) -> str | None:
    for name in names:
        for distribution in (name, f"{name}-bindings"):
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return None
