"""Peaks of resident memory, and what the machine has left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hdexport.support.memory import free_bytes, resident_bytes_of, says_out_of_memory

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


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root directory with the files that the kernel shows of memory and control groups."""
    for name, text in {
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(path: str, limit: str, usage: int, stat: str, *, version: int = 2) -> dict[str, str]:
    """The files of a control group."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {f"{path}{names[0]}": f"{limit}\n", f"{path}{names[1]}": f"{usage}\n", f"{path}memory.stat": f"{stat}\n"}


NESTED = group("a/", "1000000", 900_000, "anon 1\ninactive_file 50000") | group("a/b/", "max", 5, "inactive_file 0")
OF_VERSION_1 = group("memory/x/", "700000", 600_000, "inactive_file 1\ntotal_inactive_file 7", version=1)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("", {}, 8_000_000 * 1024, id="no groups"),
        pytest.param("0::/a/b\n", NESTED, 150_000, id="version 2, the narrowest group above"),
        pytest.param("5:cpu:/x\n4:memory:/x\n0::/\n", OF_VERSION_1, 100_007, id="version 1"),
        pytest.param("0::/docker/123\n", group("", "500", 900, "inactive_file 0"), 0, id="own group as the outermost"),
    ],
)
def test_free_memory_is_bounded_by_the_control_groups(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert free_bytes(machine(tmp_path, groups, files)) == expected


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
