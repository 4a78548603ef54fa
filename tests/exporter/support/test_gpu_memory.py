"""The memory of a GPU, as a fake of NVIDIA's library tells it, and a real one where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hdexport.support.gpu_memory import GpuMemory, GpuMemoryWatch, gpu_memory
from hdruntime.gpu.driver import gpus
from support.waiting import wait_until

_MB = 10**6


class Nvml(SimpleNamespace):
    """What nvidia-ml-py answers on a machine with two GPUs.

    Attributes:
        used: of the device, a look after the other; the last one stays.
        own: of this process, likewise; None where it is not listed.
    """

    class NVMLError(Exception):
        """The library's."""

    def __init__(self, used: list[int], own: list[int | None], *, fails_at: int | None = None) -> None:
        super().__init__(used=used, own=own, fails_at=fails_at, opened=0, looks=0, asked=[])

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:  # noqa: N802
        if index > 1:
            raise self.NVMLError("no such device")
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> object:  # noqa: N802
        self.asked.append(name)
        return name

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object:  # noqa: N802
        return SimpleNamespace(used=self.used.pop(0) if len(self.used) > 1 else self.used[0], total=1000)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:  # noqa: N802
        self.looks += 1
        if self.looks == self.fails_at:
            raise self.NVMLError("GPU is lost")
        own = self.own.pop(0) if len(self.own) > 1 else self.own[0]
        others = [SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=10**12)]
        return others if own is None else [SimpleNamespace(pid=os.getpid(), usedGpuMemory=own), *others]


GiveNvml = Callable[..., Nvml]


@pytest.fixture
def give_nvml(monkeypatch: pytest.MonkeyPatch) -> GiveNvml:
    def give(used: list[int], own: list[int | None], **options: int) -> Nvml:
        nvml = Nvml(used, own, **options)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return nvml

    return give


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, [0]), ("", [0]), ("1,0", [1]), ("GPU-12ab,GPU-34cd", ["GPU-12ab"]), ("7", [])]
)
def test_memory_is_that_of_the_first_visible_device(
    give_nvml: GiveNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: list[object]
) -> None:
    nvml = give_nvml([5], [None])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = GpuMemory(used_bytes=5, total_bytes=1000) if asked else None
    assert (gpu_memory(), nvml.asked, nvml.opened) == (expected, asked, 0)


def test_the_watch_sees_the_peak_of_this_process_while_the_block_runs(give_nvml: GiveNvml) -> None:
    nvml = give_nvml([100, 900], [None, 300, 700, 200])
    with GpuMemoryWatch() as watch:
        wait_until(lambda: nvml.looks >= 5)
    assert (watch.peak_bytes, watch.is_of_process) == (700, True)
    assert nvml.opened == 0
    assert all(thread.name != "GPU memory" for thread in threading.enumerate())


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_process_of_unknown_memory_has_the_rise_of_the_device(
    is_listed: bool, give_nvml: GiveNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = give_nvml([100, 150, 900, 400], [None])
    if is_listed:
        listed = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
        monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: listed)
    with GpuMemoryWatch() as watch:
        wait_until(lambda: nvml.used == [400])
    assert (watch.peak_bytes, watch.is_of_process) == (800, False)


def test_a_resting_watch_looks_only_on_request(give_nvml: GiveNvml) -> None:
    nvml = give_nvml([0], [5])
    with GpuMemoryWatch() as watch:
        watch.rest()
        time.sleep(0.05)
        looks = nvml.looks
        nvml.own = [8]
        time.sleep(0.05)
        assert nvml.looks == looks
        watch.look()
    assert watch.peak_bytes == 8


def test_a_gpu_that_is_lost_meanwhile_leaves_no_figure(give_nvml: GiveNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml = give_nvml([0], [5], fails_at=2)
    with GpuMemoryWatch() as watch:
        wait_until(lambda: watch.peak_bytes is None)
    assert "no longer reports the GPU's memory: GPU is lost" in caplog.text
    assert nvml.opened == 0


@pytest.mark.parametrize("has_package", [False, True])
@pytest.mark.skipif(bool(gpus()), reason="this machine has an NVIDIA GPU")
def test_there_is_no_figure_without_the_package_or_a_driver(has_package: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_package:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with GpuMemoryWatch() as watch:
        watch.look()
    assert watch.peak_bytes is gpu_memory() is None


_TAKE_A_GIGABYTE = """
import json, torch
from hdexport.support.gpu_memory import GpuMemoryWatch
with GpuMemoryWatch() as watch:
    block = torch.ones(2**28, device="cuda")
    torch.cuda.synchronize()
    watch.look()
print(json.dumps(watch.peak_bytes))
"""


@pytest.mark.gpu
def test_the_watch_sees_a_gigabyte_on_a_gpu() -> None:
    peak_bytes = json.loads(subprocess.check_output([sys.executable, "-c", _TAKE_A_GIGABYTE]))
    assert 2**30 <= peak_bytes < 2**31
