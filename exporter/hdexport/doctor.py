"""The abilities of this machine: each part is checked separately, with the command that repairs it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

from hdplugins.onnxruntime.operators import launcher_unavailable_reason
from hdruntime import __version__
from hdruntime.backends.entry import BackendEntry
from hdruntime.backends.findings import Finding, FindingStatus, Probed
from hdruntime.backends.onnxruntime.kernels import INSTALL_LAUNCHER
from hdruntime.backends.registry import backends
from hdruntime.gpu.driver import Gpu, driver_version, gpus, listed_gpus, why_no_gpu
from hdruntime.optional import installed_version
from hdruntime.process_limits import chosen_threads, free_bytes, memory_limit_bytes

_EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors")
_RUNTIME_PACKAGES = ("numpy", "tokenizers", "pyarrow", "rich")
_NEEDED = "not installed, but hdexport needs it"
_TO_BUILD = "needed to build bundles, not to run them"

_OPTIONAL_PACKAGES = {
    "triton": (
        "compiles attention kernels for GPUs; without, builds take --attention-impl native",
        "pip install triton (on Linux)",
    ),
    "cuda-bindings": (
        "runs bundles on a GPU: engines, and ONNX Runtime there",
        "pip install cuda-bindings",
    ),
    "nvidia-ml-py": ("shows a job's GPU memory", "pip install nvidia-ml-py"),
    "ray": ("runs jobs on many machines", "pip install 'hdexport[ray]'"),
}
"""Package -> its use for hdexport, and the command that installs it."""

_SHOW_GPU = "unset CUDA_VISIBLE_DEVICES; start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
"""The remedy where CUDA does not see a GPU that the driver lists."""

_LOAD_TIMEOUT_S = 60
"""A native library that takes longer to load counts as broken."""


def diagnose() -> tuple[Finding, ...]:
    """Check everything that hdexport can use. Missing and broken parts are findings and raise nothing."""
    # Those on a CPU first, and of those the one that every installation has.
    entries = [entry for entry in backends() if entry.probe]
    entries.sort(key=lambda entry: (entry.needs_gpu, entry.rank if entry.needs_gpu else -entry.rank))
    loading = {entry.name: _start_loading(entry) for entry in entries if entry.is_installed()}
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
        _launcher(),
    ]
    probed = {name: _probed(process) for name, process in loading.items()}
    findings += (entry.finding(probed.get(entry.name), found[0] if found else None) for entry in entries)
    return tuple(findings)


def _start_loading(entry: BackendEntry) -> subprocess.Popen[str]:
    """Ask a native library in a process of its own, so that a crash is a finding and not the end of the doctor."""
    command = [sys.executable, "-c", str(entry.probe), entry.package]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _probed(process: subprocess.Popen[str]) -> Probed:
    try:
        output, errors = process.communicate(timeout=_LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Probed(error=f"did not load within {_LOAD_TIMEOUT_S} s")
    if process.returncode != 0:
        lines = errors.strip().splitlines()
        return Probed(error=lines[-1] if lines else f"exit code {process.returncode}")
    # The package may print before us.
    return Probed(**json.loads(output.strip().splitlines()[-1]))


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


def _launcher() -> Finding:
    part = "kernel launcher"
    why = launcher_unavailable_reason()
    if why is not None:
        missing = f"it {why}; ONNX Runtime on a GPU computes attention without hdexport's kernels, which is slower"
        return Finding(part, FindingStatus.MISSING, missing, INSTALL_LAUNCHER)
    return Finding(part, FindingStatus.OK, "built: ONNX Runtime on a GPU runs hdexport's attention kernels")


def _package(name: str, missing: str, fix: str, status: FindingStatus = FindingStatus.MISSING) -> Finding:
    version = installed_version(name)
    return Finding(name, status, missing, fix) if version is None else Finding(name, FindingStatus.OK, version)
