"""The NVIDIA driver and GPUs of this machine, read through the driver's own libraries."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CUDA_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MANAGEMENT_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_KERNEL_MODULE_FILE = Path("/proc/driver/nvidia/version")

_NAME_BYTES = 256
_SUCCESS = 0
_NOT_INITIALIZED = 3

# CUdevice_attribute
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that CUDA programs of this process see; `architecture` is ``sm`` and its compute capability, e.g.
    ``sm90``."""

    name: str
    architecture: str
    memory_bytes: int


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA offers this process, respecting ``CUDA_VISIBLE_DEVICES``; none without a driver."""
    cuda = _load(_CUDA_LIBRARY)
    if cuda is None or cuda.cuInit(0) != _SUCCESS:
        return ()
    count = ctypes.c_int(0)
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return ()
    return tuple(_gpu(cuda, index) for index in range(count.value))


def driver_version() -> str | None:
    """Version of the NVIDIA driver, e.g. ``580.65.06``; None without a driver."""
    management = _load(_MANAGEMENT_LIBRARY)
    if management is None or management.nvmlInit_v2() != _SUCCESS:
        return _kernel_module_version()
    text = ctypes.create_string_buffer(_NAME_BYTES)
    status = management.nvmlSystemGetDriverVersion(text, _NAME_BYTES)
    management.nvmlShutdown()
    return text.value.decode() if status == _SUCCESS else None


def listed_gpus() -> tuple[str, ...]:
    """Names of the GPUs that the driver's management library lists, whether or not CUDA offers them to this process."""
    management = _load(_MANAGEMENT_LIBRARY)
    if management is None or management.nvmlInit_v2() != _SUCCESS:
        return ()
    count = ctypes.c_uint(0)
    management.nvmlDeviceGetCount_v2(ctypes.byref(count))
    names = []
    for index in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        if management.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == _SUCCESS:
            management.nvmlDeviceGetName(device, name, _NAME_BYTES)
            names.append(name.value.decode())
    management.nvmlShutdown()
    return tuple(names)


def no_gpu_reason(listed: Sequence[str]) -> str:
    """Why CUDA offers this process no GPU, as sentences; `listed` are the GPUs of `listed_gpus`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    variable = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    cuda = _load(_CUDA_LIBRARY)
    if cuda is not None and cuda.cuInit(0) == _NOT_INITIALIZED:
        return (
            "This process was forked from a process that has used CUDA, and CUDA does not start in a fork. "
            'Start processes by multiprocessing.get_context("spawn").'
        )
    if not listed:
        return f"CUDA finds no GPU{variable}."
    return f"CUDA does not find the GPU that the NVIDIA driver lists, {', '.join(listed)}{variable}."


def _gpu(cuda: Any, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory_bytes = ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    architecture = f"sm{major.value}{minor.value}"
    return Gpu(name=name.value.decode(), architecture=architecture, memory_bytes=memory_bytes.value)


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _kernel_module_version() -> str | None:
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ..."
    try:
        words = _KERNEL_MODULE_FILE.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), None)
