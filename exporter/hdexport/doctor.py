"""What this machine can do: each part looked for on its own, with the command that mends what is missing."""

from __future__ import annotations

__all__ = ["Finding", "Status", "diagnose"]

import importlib.util
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from hdexport import __version__
from hdruntime.bundle.manifest import Backend
from hdruntime.constants import CUDA_PROVIDER
from hdruntime.gpu.driver import Gpu, driver_version, gpus
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

_EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors")
_RUNTIME_PACKAGES = ("numpy", "tokenizers", "pyarrow", "rich")

_OPTIONAL_PACKAGES = {
    "triton": (
        "compiles the attention kernels of engines; those of --attention-impl native need none",
        "pip install triton (on Linux)",
    ),
    "cuda-bindings": ("runs engines on a GPU, and our attention kernels in them", "pip install cuda-bindings"),
    "nvidia-ml-py": ("shows a job's GPU memory", "pip install nvidia-ml-py"),
    "ray": ("runs jobs on many machines", "pip install 'hdexport[ray]'"),
}
"""Package -> what it does for us, and what installs it."""

_FLAVOURS = {
    "tensorrt": ("TensorRT", "pip install 'hdexport[tensorrt]'"),
    "tensorrt_rtx": ("TensorRT-RTX", "pip install 'hdexport[rtx]'"),
    "tensorrt_lean": ("TensorRT lean runtime", "pip install 'hdexport[lean]'"),
}
"""Import name -> what to call it, and what installs it."""

_LOAD_TIMEOUT_S = 60
"""A native library that takes longer to load is called broken."""

# Native libraries are loaded in a process of their own: a crash is a finding then, not the end of the doctor.
_LOAD = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
providers = module.get_available_providers() if hasattr(module, "get_available_providers") else []
print(json.dumps({"version": module.__version__, "providers": providers}))
"""


class Status(str, Enum):
    """What was found: ``INFO`` is a fact, ``MISSING`` a limit to what can be done, ``BROKEN`` a fault."""

    OK = "ok"
    INFO = "info"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One part of the machine.

    Attributes:
        part: what was looked for.
        status: what was found.
        detail: version, name or reason.
        fix: what to type to get it; None when nothing is to be done.
    """

    part: str
    status: Status
    detail: str
    fix: str | None = None


def diagnose() -> tuple[Finding, ...]:
    """Look for everything that hdexport can use. Nothing that is missing or broken raises."""
    loading = {name: _Loading(name) for name in (*_FLAVOURS, "onnxruntime") if _is_installed(name)}
    found = gpus()
    findings = [
        Finding("Python", Status.OK, f"{platform.python_version()} ({sys.executable})"),
        Finding("hdexport", Status.OK, __version__),
        Finding("system", Status.INFO, platform.platform()),
        Finding("processor", Status.INFO, _processor()),
        _driver(),
        _gpu(found),
        *(_runtime_package(name) for name in _RUNTIME_PACKAGES),
        *(_export_package(name) for name in _EXPORT_PACKAGES),
        *(_optional_package(name, purpose, fix) for name, (purpose, fix) in _OPTIONAL_PACKAGES.items()),
    ]
    loaded = {name: process.result() for name, process in loading.items()}
    findings.append(_onnxruntime(loaded.get("onnxruntime"), has_gpu=bool(found)))
    findings.extend(_flavour(name, loaded.get(name), has_gpu=bool(found)) for name in _FLAVOURS)
    return tuple(findings)


@dataclass(frozen=True)
class _Loaded:
    """A package that was imported, or the last line of why it was not."""

    version: str = ""
    providers: tuple[str, ...] = ()
    error: str | None = None


class _Loading:
    """A package being imported in a process of its own."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOAD, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def result(self) -> _Loaded:
        try:
            output, errors = self._process.communicate(timeout=_LOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return _Loaded(error=f"did not load within {_LOAD_TIMEOUT_S} s")
        if self._process.returncode != 0:
            lines = errors.strip().splitlines()
            return _Loaded(error=lines[-1] if lines else f"exit code {self._process.returncode}")
        # The package may print before us.
        answer = json.loads(output.strip().splitlines()[-1])
        return _Loaded(version=answer["version"], providers=tuple(answer["providers"]))


def _processor() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _driver() -> Finding:
    version = driver_version()
    if version is None:
        return Finding("NVIDIA driver", Status.MISSING, "none: bundles run on the CPU here")
    return Finding("NVIDIA driver", Status.OK, version)


def _gpu(found: tuple[Gpu, ...]) -> Finding:
    if not found:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"
        return Finding("GPU", Status.MISSING, f"CUDA sees none{reason}")
    names = [f"{gpu.name}, {gpu.architecture}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in found]
    return Finding("GPU", Status.OK, "; ".join(names))


def _runtime_package(name: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, Status.BROKEN, "not installed, but hdexport needs it", f"pip install {name}")
    return Finding(name, Status.OK, version)


def _export_package(name: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(
            name,
            Status.MISSING,
            "needed to build bundles, not to run them",
            "pip install 'hdexport[export]'",
        )
    return Finding(name, Status.OK, version)


def _optional_package(name: str, purpose: str, fix: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, Status.MISSING, purpose, fix)
    return Finding(name, Status.OK, version)


def _onnxruntime(loaded: _Loaded | None, *, has_gpu: bool) -> Finding:
    part = "ONNX Runtime"
    if loaded is None:
        return Finding(part, Status.BROKEN, "not installed, but hdexport needs it", "pip install onnxruntime")
    if loaded.error is not None:
        return Finding(part, Status.BROKEN, loaded.error, "pip install --force-reinstall onnxruntime")
    detail = f"{loaded.version}: {', '.join(loaded.providers)}"
    on_gpu = CUDA_PROVIDER in loaded.providers
    if not on_gpu and _version("onnxruntime") and _version("onnxruntime-gpu"):
        return Finding(
            part,
            Status.BROKEN,
            f"{detail}; onnxruntime and onnxruntime-gpu share their files, and the CPU's overwrote the GPU's",
            INSTALL_ONNXRUNTIME_CUDA,
        )
    if has_gpu and not on_gpu:
        reason = f"{detail}; the backend {Backend.ONNXRUNTIME_CUDA.value} cannot use the GPU"
        return Finding(part, Status.MISSING, reason, INSTALL_ONNXRUNTIME_CUDA)
    return Finding(part, Status.OK, detail)


def _flavour(name: str, loaded: _Loaded | None, *, has_gpu: bool) -> Finding:
    part, fix = _FLAVOURS[name]
    if loaded is None:
        if name == "tensorrt" and not has_gpu:
            return Finding(part, Status.INFO, "not installed; it needs a GPU")
        # Few need it: only where bundles hold version-compatible engines.
        status = Status.INFO if name == "tensorrt_lean" else Status.MISSING
        return Finding(part, status, "not installed", fix)
    if loaded.error is not None:
        return Finding(part, Status.BROKEN, loaded.error, fix)
    if name != "tensorrt_lean" and _version("polygraphy") is None:
        return Finding(part, Status.MISSING, f"{loaded.version}; building engines needs polygraphy", fix)
    if has_gpu or name != "tensorrt_rtx":
        return Finding(part, Status.OK, loaded.version)
    return Finding(part, Status.OK, f"{loaded.version}: builds engines here, running them needs a GPU")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
