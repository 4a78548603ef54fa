"""The memory of the GPU that this process uses, from NVIDIA's management library."""

from __future__ import annotations

__all__ = ["GpuMemory", "gpu_memory"]

import importlib
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Memory of a GPU, all processes together."""

    used_bytes: int
    total_bytes: int


def gpu_memory() -> GpuMemory | None:
    """The memory of CUDA's first device; None without the package nvidia-ml-py, or without its library."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(_first_device(nvml))
            return GpuMemory(used_bytes=memory.used, total_bytes=memory.total)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def _first_device(nvml: Any) -> Any:
    # NVML numbers all devices of the machine; CUDA numbers those that this variable names, by number or by UUID.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdecimal() else 0)
