"""The abilities of this machine: each part is checked separately, with the command that repairs it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from hdruntime import __version__
from hdruntime.backends.processor import has_int8
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.passport import builds_for
from hdruntime.constants import CUDA_PROVIDER
from hdruntime.gpu.driver import Gpu, driver_version, gpus, listed_gpus, why_no_gpu
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA, is_installed
from hdruntime.process_limits import chosen_threads, free_bytes, memory_limit_bytes

_EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors")
_RUNTIME_PACKAGES = ("numpy", "tokenizers", "pyarrow", "rich")
_NEEDED = "not installed, but hdexport needs it"
_TO_BUILD = "needed to build bundles, not to run them"

_OPTIONAL_PACKAGES = {
    "triton": (
        "compiles the attention kernels of engines, except those with --attention-impl native",
        "pip install triton (on Linux)",
    ),
    "cuda-bindings": ("runs engines on a GPU, and hdexport's attention kernels in them", "pip install cuda-bindings"),
    "nvidia-ml-py": ("shows a job's GPU memory", "pip install nvidia-ml-py"),
    "ray": ("runs jobs on many machines", "pip install 'hdexport[ray]'"),
}
"""Package -> its use for hdexport, and the command that installs it."""

_FLAVOURS = {
    "tensorrt": ("TensorRT", "pip install 'hdexport[tensorrt]'"),
    "tensorrt_rtx": ("TensorRT-RTX", "pip install 'hdexport[rtx]'"),
    "tensorrt_lean": ("TensorRT lean runtime", "pip install 'hdexport[lean]'"),
}
"""Import name -> its name in messages, and the command that installs it."""

_SHOW_GPU = "unset CUDA_VISIBLE_DEVICES; start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
"""The remedy where CUDA does not see a GPU that the driver lists."""

_LOAD_TIMEOUT_S = 60
"""A native library that takes longer to load counts as broken."""

# Each native library is loaded in its own process, so that a crash is a finding and not the end of the doctor.
_LOAD = """
import importlib, json, sys
print(json.dumps({"version": importlib.import_module(sys.argv[1]).__version__}))
"""

_DOUBLING = (
    "080812003a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a02"
    "0801620f0a0179120a0a08080112040a02080142040a00100d"
)
"""A graph in ONNX, x + x of one number."""

_LOAD_ONNXRUNTIME = f"""
import json
import onnxruntime
from hdruntime.constants import CUDA_PROVIDER
from hdruntime.gpu.driver import gpus
found = dict(version=onnxruntime.__version__, providers=onnxruntime.get_available_providers())
if CUDA_PROVIDER in found["providers"] and gpus():
    session = onnxruntime.InferenceSession(bytes.fromhex("{_DOUBLING}"), providers=[CUDA_PROVIDER])
    # With a line on stderr it runs on the CPU where a library of CUDA is missing.
    found["opens_cuda"] = CUDA_PROVIDER in session.get_providers()
print(json.dumps(found))
"""
"""Loaded, and asked for a session on the GPU: a provider that is listed may lack its libraries."""


_LOAD_OPENVINO = """
import json
from hdruntime.backends.cpu_choice import prefers_openvino_here
from hdruntime.backends.openvino.devices import chosen_device, new_core
from hdruntime.optional import require
version, core = require("openvino").__version__, new_core()
found = [chosen_device(core, name) for name in core.available_devices]
devices = [[device.name, device.model, device.capabilities] for device in found]
print(json.dumps({"version": version, "devices": devices, "prefers_openvino": prefers_openvino_here()}))
"""
"""Loaded without its telemetry, and asked for its devices."""

_PRECISIONS = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16", "INT8": "int8"}
"""OpenVINO's words for a device's types -> ours."""


class FindingStatus(str, Enum):
    """The finding: ``INFO`` is a fact, ``MISSING`` a limit of this machine, ``BROKEN`` a fault."""

    OK = "ok"
    INFO = "info"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One part of the machine.

    Attributes:
        part: the part of the machine.
        status: the finding.
        detail: version, name or reason.
        fix: the command that repairs it; None where nothing is to be done.
    """

    part: str
    status: FindingStatus
    detail: str
    fix: str | None = None


def diagnose() -> tuple[Finding, ...]:
    """Check everything that hdexport can use. Missing and broken parts are findings and raise nothing."""
    codes = dict.fromkeys(_FLAVOURS, _LOAD) | {"onnxruntime": _LOAD_ONNXRUNTIME, "openvino": _LOAD_OPENVINO}
    loading = {name: _start_loading(code, name) for name, code in codes.items() if is_installed(name)}
    found = gpus()
    findings = [
        Finding("Python", FindingStatus.OK, f"{platform.python_version()} ({sys.executable})"),
        Finding("hdexport", FindingStatus.OK, __version__),
        Finding("system", FindingStatus.INFO, platform.platform()),
        Finding("processor", FindingStatus.INFO, f"{platform.machine()}, {os.cpu_count()} CPUs"),
        Finding("CPU threads", FindingStatus.INFO, chosen_threads()[1]),
        Finding("memory", FindingStatus.INFO, _memory()),
        _driver(),
        _gpu(found),
        *(_package(name, _NEEDED, f"pip install {name}", FindingStatus.BROKEN) for name in _RUNTIME_PACKAGES),
        *(_package(name, _TO_BUILD, "pip install 'hdexport[export]'") for name in _EXPORT_PACKAGES),
        *(_package(name, purpose, fix) for name, (purpose, fix) in _OPTIONAL_PACKAGES.items()),
    ]
    loaded = {name: _loaded(process) for name, process in loading.items()}
    findings.append(_onnxruntime(loaded.get("onnxruntime"), has_gpu=bool(found)))
    findings.append(_openvino(loaded.get("openvino")))
    findings.extend(_flavour(name, loaded.get(name), found[0] if found else None) for name in _FLAVOURS)
    return tuple(findings)


@dataclass(frozen=True)
class _Loaded:
    """A package that was imported and its answer, or the last line of why it was not."""

    version: str = ""
    providers: tuple[str, ...] = ()
    devices: tuple[tuple[str, str, Sequence[str]], ...] = ()
    prefers_openvino: bool = False
    opens_cuda: bool | None = None
    error: str | None = None


def _start_loading(code: str, name: str) -> subprocess.Popen[str]:
    """Import a package in a process of its own."""
    command = [sys.executable, "-c", code, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _loaded(process: subprocess.Popen[str]) -> _Loaded:
    try:
        output, errors = process.communicate(timeout=_LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return _Loaded(error=f"did not load within {_LOAD_TIMEOUT_S} s")
    if process.returncode != 0:
        lines = errors.strip().splitlines()
        return _Loaded(error=lines[-1] if lines else f"exit code {process.returncode}")
    # The package may print before us.
    return _Loaded(**json.loads(output.strip().splitlines()[-1]))


def _memory() -> str:
    free, limit = free_bytes(), memory_limit_bytes()
    found = [] if free is None else [f"{free / 1e9:.1f} GB free"]
    found += [] if limit is None else [f"the container's limit is {limit / 1e9:.1f} GB"]
    return "; ".join(found) or "not known on this system"


def _driver() -> Finding:
    version = driver_version()
    if version is None:
        return Finding("NVIDIA driver", FindingStatus.MISSING, "none: bundles run on the CPU here")
    return Finding("NVIDIA driver", FindingStatus.OK, version)


def _gpu(found: tuple[Gpu, ...]) -> Finding:
    if not found:
        listed = listed_gpus()
        fix = _SHOW_GPU if listed else None
        return Finding("GPU", FindingStatus.MISSING, why_no_gpu(listed), fix)
    names = [f"{gpu.name}, {gpu.architecture}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in found]
    return Finding("GPU", FindingStatus.OK, "; ".join(names))


def _package(name: str, missing: str, fix: str, status: FindingStatus = FindingStatus.MISSING) -> Finding:
    version = _version(name)
    return Finding(name, status, missing, fix) if version is None else Finding(name, FindingStatus.OK, version)


def _onnxruntime(loaded: _Loaded | None, *, has_gpu: bool) -> Finding:
    part = "ONNX Runtime"
    if loaded is None:
        return Finding(part, FindingStatus.BROKEN, _NEEDED, "pip install onnxruntime")
    if loaded.error is not None:
        return Finding(part, FindingStatus.BROKEN, loaded.error, "pip install --force-reinstall onnxruntime")
    detail = f"{loaded.version}: {', '.join(loaded.providers)}"
    on_gpu = CUDA_PROVIDER in loaded.providers
    if not on_gpu and _version("onnxruntime") and _version("onnxruntime-gpu"):
        return Finding(
            part,
            FindingStatus.BROKEN,
            f"{detail}; onnxruntime and onnxruntime-gpu share their files, and the CPU's overwrote the GPU's",
            INSTALL_ONNXRUNTIME_CUDA,
        )
    if has_gpu and not on_gpu:
        reason = f"{detail}; the backend {Backend.ONNXRUNTIME_CUDA.value} cannot use the GPU"
        return Finding(part, FindingStatus.MISSING, reason, INSTALL_ONNXRUNTIME_CUDA)
    if loaded.opens_cuda is False:
        reason = f"{detail}; no session opens on the GPU: libraries of CUDA or cuDNN are missing or of another version"
        return Finding(part, FindingStatus.BROKEN, reason, INSTALL_ONNXRUNTIME_CUDA)
    return Finding(part, FindingStatus.OK, detail)


def _openvino(loaded: _Loaded | None) -> Finding:
    part, fix = "OpenVINO", "pip install 'hdexport[openvino]'"
    if loaded is None:
        return Finding(part, FindingStatus.MISSING, "not installed: on the CPU, auto takes onnxruntime", fix)
    if loaded.error is not None:
        return Finding(part, FindingStatus.BROKEN, loaded.error, f"pip install --force-reinstall openvino; {fix}")
    devices = [
        f"{name} ({model}: {', '.join(words for key, words in _PRECISIONS.items() if key in has)})"
        for name, model, has in loaded.devices
    ]
    faster = "windows and, outside of float32, for dense attention, blocks and chunks, of bundles with its graph"
    but_for = "" if has_int8() else "; not for int8, without VNNI"
    taken = f"openvino for {faster}{but_for}" if loaded.prefers_openvino else "onnxruntime"
    return Finding(part, FindingStatus.OK, f"{loaded.version}: {'; '.join(devices)}; on the CPU, auto takes {taken}")


def _flavour(name: str, loaded: _Loaded | None, gpu: Gpu | None) -> Finding:
    part, fix = _FLAVOURS[name]
    limit = None
    if gpu is not None and not builds_for(Backend(name), gpu.architecture):
        limit = f"it supports no GPU of {gpu.architecture}"
    if loaded is None:
        if limit:
            return Finding(part, FindingStatus.INFO, f"not installed; {limit}")
        if name == "tensorrt" and gpu is None:
            return Finding(part, FindingStatus.INFO, "not installed; it needs a GPU")
        # Only bundles with version-compatible engines need it.
        status = FindingStatus.INFO if name == "tensorrt_lean" else FindingStatus.MISSING
        return Finding(part, status, "not installed", fix)
    if loaded.error is not None:
        return Finding(part, FindingStatus.BROKEN, loaded.error, fix)
    if name != "tensorrt_lean" and _version("polygraphy") is None:
        return Finding(part, FindingStatus.MISSING, f"{loaded.version}; building engines needs polygraphy", fix)
    if limit:
        return Finding(part, FindingStatus.INFO, f"{loaded.version}; {limit}")
    if gpu is not None or name != "tensorrt_rtx":
        return Finding(part, FindingStatus.OK, loaded.version)
    return Finding(part, FindingStatus.OK, f"{loaded.version}: builds engines here, running them needs a GPU")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
