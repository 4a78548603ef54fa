"""Peaks of resident memory, and the words of libraries without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hdexport.support.memory import resident_bytes_of, says_out_of_memory

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
