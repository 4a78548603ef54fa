"""Memory: how much processes take, the peak of this one, and how much the machine has left."""

from __future__ import annotations

__all__ = [
    "free_bytes",
    "peak_resident_bytes",
    "reset_peak",
    "resident_bytes",
    "resident_bytes_of",
    "says_out_of_memory",
]

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_STATUS = Path("/proc/self/status")

_OUT_OF_MEMORY = (
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "bad_alloc",
    "cannot allocate memory",
    "can't allocate memory",
    "cudaerrormemoryallocation",
    "failed to allocate memory",
    "memoryerror",
    "out of memory",
    "unable to allocate",
)
"""Words of PyTorch, ONNX Runtime, CUDA, NumPy, C++ and the kernel where memory was short, in lower case."""

# Files of control groups, versions 1 and 2: the limit, the usage, and the usage's reclaimable part.
_GROUP_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_FILES_2 = ("memory.max", "memory.current", "inactive_file")


def resident_bytes() -> int | None:
    """Resident memory of this process; None where there is no ``/proc``, that is, outside of Linux."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int | None:
    """The most resident memory that this process had since its start, or since :func:`reset_peak`; None likewise."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Let the peak of this process begin again at the present memory; False where the kernel cannot do that."""
    try:
        # proc(5): writing 5 resets the peak resident set size, VmHWM.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_bytes_of(pids: Iterable[int], *, shared_once: bool = False) -> int:
    """Resident memory of processes together; processes that have ended count nothing.

    Args:
        pids: their ids.
        shared_once: count pages that several processes share, such as a library's, once and not for each. This count is
            exact and slow: the kernel looks at every page, and the processes wait if they ask for memory meanwhile.
    """
    return sum(map(_share_bytes if shared_once else _statm_bytes, pids))


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be taken before the kernel kills a process: the machine's, and of this process' control groups.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        the least of them; None where there is no ``/proc``.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
        groups = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    available = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return min([int(available.split()[1]) * 1024, *_left_in_groups(root / "sys/fs/cgroup", groups)])


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text is from a library, or the kernel, that got no memory."""
    return any(said in text.lower() for said in _OUT_OF_MEMORY)


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _statm_bytes(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _share_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # The process has ended, or the kernel was built without this file.
        return _statm_bytes(pid)
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _left_in_groups(mount: Path, groups: str) -> Iterator[int]:
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_up_to(mount, path, _GROUP_FILES_2)
        elif "memory" in controllers.split(","):
            yield from _left_up_to(mount / "memory", path, _GROUP_FILES_1)


def _left_up_to(mount: Path, path: str, files: tuple[str, str, str]) -> Iterator[int]:
    """Memory left in a group and its parents. A container may see its own group only, where the outermost should be."""
    limit_file, usage_file, inactive_field = files
    inside = Path(path.lstrip("/"))
    for group in dict.fromkeys((inside, *inside.parents)):
        try:
            limit = (mount / group / limit_file).read_text().strip()
            usage = int((mount / group / usage_file).read_text())
            fields = dict(line.split() for line in (mount / group / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            # Pages that files left in the page cache count as used, and go when memory is asked for.
            yield max(0, int(limit) - usage + int(fields.get(inactive_field, 0)))
