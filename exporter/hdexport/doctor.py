"""Diagnose this machine: each component is checked separately, with the command that repairs it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

from hdplugins.onnxruntime.operators import launcher_unavailable_reason
from hdruntime import __version__
from hdruntime.backends.diagnostics import DiagnosticResult, DiagnosticStatus, ProbeResult
from hdruntime.backends.entry import BackendEntry
from hdruntime.backends.onnxruntime.kernels import INSTALL_LAUNCHER
from hdruntime.backends.registry import backends
from hdruntime.gpu.driver import Gpu, driver_version, gpus, listed_gpus, no_gpu_reason
from hdruntime.optional import installed_version
from hdruntime.process_limits import chosen_threads, free_bytes, memory_limit_bytes

_EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors")
_RUNTIME_PACKAGES = ("numpy", "tokenizers", "pyarrow", "rich")
_NEEDED = "not installed; hdexport needs it"
_TO_BUILD = "not installed; builds need it, and running a bundle does not"

_OPTIONAL_PACKAGES = {
    "triton": (
        "not installed; it compiles attention kernels for GPUs. Without it, builds use --attention-impl native",
        "pip install triton (on Linux)",
    ),
    "cuda-bindings": (
        "not installed; bundles need it to run on a GPU",
        "pip install cuda-bindings",
    ),
    "nvidia-ml-py": ("not installed; it reports the GPU memory of a job", "pip install nvidia-ml-py"),
    "ray": ("not installed; it runs jobs on a Ray cluster", "pip install 'hdexport[ray]'"),
}
"""Package -> detail of its result where it is missing, and the command that installs it."""

_SHOW_GPU = "unset CUDA_VISIBLE_DEVICES; start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
"""The fix where CUDA does not find a GPU that the driver lists."""

_LOAD_TIMEOUT_S = 60
"""Seconds after which a native library that does not load counts as broken."""


def diagnose() -> tuple[DiagnosticResult, ...]:
    """Diagnose every component that hdexport can use. A missing or broken component is a result, not an error."""
    # CPU backends first, and ONNX Runtime, which every installation has, before the others.
    entries = [entry for entry in backends() if entry.probe]
    entries.sort(key=lambda entry: (entry.needs_gpu, entry.rank if entry.needs_gpu else -entry.rank))
    loading = {entry.name: _start_loading(entry) for entry in entries if entry.is_installed()}
    visible = gpus()
    results = [
        DiagnosticResult("Python", DiagnosticStatus.OK, f"{platform.python_version()} ({sys.executable})"),
        DiagnosticResult("hdexport", DiagnosticStatus.OK, __version__),
        DiagnosticResult("system", DiagnosticStatus.INFO, platform.platform()),
        DiagnosticResult("processor", DiagnosticStatus.INFO, f"{platform.machine()}, {os.cpu_count()} CPUs"),
        DiagnosticResult("CPU threads", DiagnosticStatus.INFO, chosen_threads()[1]),
        DiagnosticResult("memory", DiagnosticStatus.INFO, _memory()),
        _driver(),
        _gpu(visible),
        *(_package(name, _NEEDED, f"pip install {name}", DiagnosticStatus.BROKEN) for name in _RUNTIME_PACKAGES),
        *(_package(name, _TO_BUILD, "pip install 'hdexport[export]'") for name in _EXPORT_PACKAGES),
        *(_package(name, purpose, fix) for name, (purpose, fix) in _OPTIONAL_PACKAGES.items()),
        _launcher(),
    ]
    probes = {name: _probe_result(process) for name, process in loading.items()}
    gpu = visible[0] if visible else None
    results += (entry.diagnose(probes.get(entry.name), gpu) for entry in entries)
    return tuple(results)


def _start_loading(entry: BackendEntry) -> subprocess.Popen[str]:
    """Start a process that loads a native library, so that a crash is a result and does not end the doctor."""
    command = [sys.executable, "-c", str(entry.probe), entry.package]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _probe_result(process: subprocess.Popen[str]) -> ProbeResult:
    try:
        output, errors = process.communicate(timeout=_LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return ProbeResult(error=f"did not load within {_LOAD_TIMEOUT_S} s")
    if process.returncode != 0:
        lines = errors.strip().splitlines()
        return ProbeResult(error=lines[-1] if lines else f"exit code {process.returncode}")
    # The package may print when it is imported.
    return ProbeResult(**json.loads(output.strip().splitlines()[-1]))


def _memory() -> str:
    free, limit = free_bytes(), memory_limit_bytes()
    parts = [] if free is None else [f"{free / 1e9:.1f} GB free"]
    parts += [] if limit is None else [f"the container's limit is {limit / 1e9:.1f} GB"]
    return "; ".join(parts) or "unknown on this system"


def _driver() -> DiagnosticResult:
    version = driver_version()
    if version is None:
        return DiagnosticResult("NVIDIA driver", DiagnosticStatus.MISSING, "not found; bundles run on the CPU")
    return DiagnosticResult("NVIDIA driver", DiagnosticStatus.OK, version)


def _gpu(visible: tuple[Gpu, ...]) -> DiagnosticResult:
    if not visible:
        listed = listed_gpus()
        fix = _SHOW_GPU if listed else None
        return DiagnosticResult("GPU", DiagnosticStatus.MISSING, no_gpu_reason(listed), fix)
    names = [f"{gpu.name}, {gpu.architecture}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in visible]
    return DiagnosticResult("GPU", DiagnosticStatus.OK, "; ".join(names))


def _launcher() -> DiagnosticResult:
    component = "kernel launcher"
    reason = launcher_unavailable_reason()
    if reason is not None:
        missing = f"the launcher {reason}; ONNX Runtime on a GPU computes attention without hdexport's kernels, slower"
        return DiagnosticResult(component, DiagnosticStatus.MISSING, missing, INSTALL_LAUNCHER)
    return DiagnosticResult(
        component, DiagnosticStatus.OK, "installed: ONNX Runtime on a GPU runs hdexport's attention kernels"
    )


def _package(
    name: str, missing: str, fix: str, status: DiagnosticStatus = DiagnosticStatus.MISSING
) -> DiagnosticResult:
    version = installed_version(name)
    return (
        DiagnosticResult(name, status, missing, fix)
        if version is None
        else DiagnosticResult(name, DiagnosticStatus.OK, version)
    )
