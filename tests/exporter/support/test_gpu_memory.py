"""The memory of a GPU, as a fake of NVIDIA's library tells it, and a real one where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from hdexport.support.gpu_memory import GpuMemory, GpuMemoryWatch, gpu_memory
from hdruntime.gpu.driver import gpus
from support.waiting import wait_until


def test_the_watch_sees_the_peak_of_this_process_on_the_first_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-ml-py tells it, of a machine with two GPUs."""
    own, opened, asked = [None, 300, 700, 200], [], set()

    def processes(handle: object) -> list[object]:
        number = own.pop(0) if len(own) > 1 else own[0]
        others = [SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=10**12)]
        return others if number is None else [SimpleNamespace(pid=os.getpid(), usedGpuMemory=number), *others]

    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: opened.append(1),
        nvmlShutdown=opened.pop,
        nvmlDeviceGetHandleByIndex=lambda index: asked.add(index) or index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5, total=1000),
        nvmlDeviceGetComputeRunningProcesses=processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with GpuMemoryWatch() as watch:
        wait_until(lambda: len(own) == 1)
    assert (watch.peak_bytes, watch.is_of_process) == (700, True)
    assert gpu_memory() == GpuMemory(used_bytes=5, total_bytes=1000)
    assert (asked, opened) == ({1}, [])
    assert all(thread.name != "GPU memory" for thread in threading.enumerate())


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
