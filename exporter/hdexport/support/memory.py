"""Memory: how much processes take, and the peak of this one."""

from __future__ import annotations

import os
from collections.abc import Iterable
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


def resident_bytes() -> int | None:
    """Resident memory of this process; None outside of Linux, where there is no ``/proc``."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int | None:
    """Peak resident memory of this process since its start or `reset_peak`; None outside of Linux."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Restarts the peak of this process at the present memory; False where the kernel cannot do that."""
    try:
        # proc(5): writing 5 resets the peak resident set size, VmHWM.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_bytes_of(pids: Iterable[int], *, shared_once: bool = False) -> int:
    """Resident memory of processes together; processes that have ended count nothing. With `shared_once`, pages that
    several processes share, such as a library's, count once and not for each. That count is exact and slow: the kernel
    looks at every page, and the processes wait if they ask for memory meanwhile."""
    return sum(map(_share_bytes if shared_once else _statm_bytes, pids))


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
