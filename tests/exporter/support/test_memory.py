"""Peaks of resident memory, and the words of libraries without memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hdexport.support.memory import GpuMemory, GpuMemoryWatch, gpu_memory, resident_bytes_of, says_out_of_memory
from hdruntime.gpu.driver import gpus
from support.waiting import wait_until

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")

_MB = 10**6


_PEAK = """
import json
from hdexport.support.memory import peak_resident_bytes, reset_peak, resident_bytes
assert reset_peak()
before = resident_bytes()
block = bytearray(b"x") * 50_000_000
del block
peak, after = peak_resident_bytes(), resident_bytes()
reset_peak()
print(json.dumps([before, peak, after, peak_resident_bytes()]))
"""


@needs_linux
def test_the_peak_stays_until_it_is_reset() -> None:
    # In a process of its own: one with very many mappings may keep what it frees.
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    before, peak, after, peak_after_reset = json.loads(done.stdout)
    assert peak - before > 45 * _MB
    assert after - before < 20 * _MB
    assert peak_after_reset < peak - 25 * _MB


_FORKS = """
import os, signal, sys
block = bytearray(b"x") * 100_000_000
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        signal.pause()
    children.append(pid)
print(*children, flush=True)
sys.stdin.read()
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.wait()
"""


@needs_linux
def test_pages_that_processes_share_can_be_counted_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [process.pid, *map(int, process.stdout.readline().split())]
        for_each, once = resident_bytes_of(pids), resident_bytes_of(pids, shared_once=True)
        process.communicate("")
    assert len(pids) == 4
    assert for_each > 380 * _MB
    assert 95 * _MB < once < 200 * _MB
    assert resident_bytes_of(pids) == resident_bytes_of(pids, shared_once=True) == 0


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA out of memory. Tried to allocate 20.00 GiB.",
        "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
    ],
)  # fmt: skip
def test_what_libraries_say_without_memory_is_known(text: str) -> None:
    assert says_out_of_memory(text)


def test_other_errors_are_not_taken_for_it() -> None:
    assert not says_out_of_memory("CUDA error: an illegal memory access was encountered")


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
from hdexport.support.memory import GpuMemoryWatch
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
