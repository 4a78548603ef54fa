"""GPUs and driver, read from fakes of the driver's libraries."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from hdruntime.gpu import driver as gpu
from hdruntime.gpu.driver import Gpu, driver_version, gpus, listed_gpus, no_gpu_reason


class _Cuda:
    """The CUDA driver's functions on a machine with two GPUs."""

    names = (b"NVIDIA H100 80GB HBM3", b"NVIDIA GeForce RTX 5090")
    capabilities = ((9, 0), (12, 0))

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, count: ctypes._Pointer) -> int:  # noqa: N802
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device: ctypes._Pointer, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: ctypes.Array, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        name.value = self.names[device.value]
        return 0

    def cuDeviceTotalMem_v2(self, size: ctypes._Pointer, device: ctypes.c_int) -> int:  # noqa: N802
        size._obj.value = (80 - 48 * device.value) * 2**30
        return 0

    def cuDeviceGetAttribute(self, value: ctypes._Pointer, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        value._obj.value = self.capabilities[device.value][attribute - 75]
        return 0


class _Management:
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlSystemGetDriverVersion(self, text: ctypes.Array, size: int) -> int:  # noqa: N802
        text.value = b"580.65.06"
        return 0

    def nvmlDeviceGetCount_v2(self, count: ctypes._Pointer) -> int:  # noqa: N802
        count._obj.value = len(_Cuda.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: ctypes._Pointer) -> int:  # noqa: N802
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, name: ctypes.Array, size: int) -> int:  # noqa: N802
        name.value = _Cuda.names[(device.value or 0) - 1]
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0


def test_every_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_CUDA_LIBRARY", "libhdexport-no-such-library.so")
    assert gpus() == ()
    monkeypatch.setattr(gpu, "_load", lambda name: _Cuda())
    assert gpus() == (
        Gpu(name="NVIDIA H100 80GB HBM3", architecture="sm90", memory_bytes=80 * 2**30),
        Gpu(name="NVIDIA GeForce RTX 5090", architecture="sm120", memory_bytes=32 * 2**30),
    )
    monkeypatch.setattr(gpu, "_load", lambda name: _Cuda(status=100))
    assert gpus() == (), "a driver that does not start"


def test_the_version_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_load", lambda name: _Management())
    assert driver_version() == "580.65.06"


def test_the_driver_lists_gpus_that_cuda_does_not_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_MANAGEMENT_LIBRARY", "libhdexport-no-such-library.so")
    assert listed_gpus() == ()
    monkeypatch.setattr(gpu, "_load", lambda name: _Management())
    assert listed_gpus() == ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090")


def test_a_fork_of_a_process_that_has_used_cuda_is_told_why_it_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ("NVIDIA H100 80GB HBM3",)
    monkeypatch.setattr(gpu, "_load", lambda name: _Cuda(status=3))
    assert gpus() == ()
    assert no_gpu_reason(listed).startswith("This process was forked from a process that has used CUDA")
    monkeypatch.setattr(gpu, "_load", lambda name: _Cuda(status=100))
    assert no_gpu_reason(listed).startswith("CUDA does not find the GPU that the NVIDIA driver lists")


def test_without_the_management_library_the_version_comes_from_the_kernel_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "_MANAGEMENT_LIBRARY", "libhdexport-no-such-library.so")
    file = tmp_path / "version"
    monkeypatch.setattr(gpu, "_KERNEL_MODULE_FILE", file)
    assert driver_version() is None
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:15:39 UTC 2025\n")
    assert driver_version() == "580.65.06"
