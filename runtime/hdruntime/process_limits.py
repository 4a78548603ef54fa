"""What this process may use of the machine: CPUs and memory.

The kernel's control groups limit a container, a systemd service or a job of a cluster. Their files are read in version
1 and 2: of the process's group and of all groups above it, because each one's limit counts. A container sees its own
group in the place of the outermost.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
"""Where ``proc`` and ``sys`` are; tests have another."""

# Files of memory in versions 1 and 2: the limit, the usage, and the usage's reclaimable part in memory.stat.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def usable_cpus() -> frozenset[int]:
    """Numbers of the CPUs that this process may run on: its affinity mask, which a cpuset narrows, too."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    # macOS has no affinity.
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that this process's control groups leave it; None for any."""
    quotas = []
    for version, group in _groups("cpu", root):
        # A file is missing in the outermost group, and has "max" or -1 where there is no limit.
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def chosen_threads(asked: int | None = None, *, root: Path = _ROOT) -> tuple[int, str]:
    """The number of threads that compute, and why.

    One for each core among the CPUs that the process may run on, as the libraries count: two threads of a
    core share its multipliers, so that a second one makes matrix products no faster. But no more than the quota rounded
    up: further threads would wait for each other as soon as the quota is spent. The user's number, `asked`, is taken as
    it is.
    """
    if asked is not None:
        return asked, f"{_counted(asked, 'thread')}: asked for"
    cpus, machine, quota = usable_cpus(), os.cpu_count() or 1, cpu_quota(root)
    cores = len({_siblings(cpu, root) for cpu in cpus})
    threads = cores if quota is None else min(cores, math.ceil(quota))
    if quota is not None and quota < cores:
        why = f"the container's quota is {_counted(quota, 'CPU')}"
    else:
        why = _counted(len(cpus), "CPU")
        if len(cpus) < machine:
            why = f"the process may use {len(cpus)} of {_counted(machine, 'CPU')} (affinity)"
        if cores < len(cpus):
            why += f", on {_counted(cores, 'core')}"
    return threads, f"{_counted(threads, 'thread')}: {why}"


def free_bytes(root: Path = _ROOT) -> int | None:
    """Memory that can be taken before the kernel kills a process, the least of the machine's and of what this process's
    control groups leave; None where there is no ``/proc``."""
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    left = [available * 1024]
    for version, group in _groups("memory", root):
        limit_file, usage_file, inactive_field = _MEMORY_FILES[version]
        # A limit of "max" is no number.
        with contextlib.suppress(OSError, ValueError):
            limit, usage = (int((group / name).read_text()) for name in (limit_file, usage_file))
            # Pages that files left in the page cache count as used, and go when memory is asked for.
            left.append(max(0, limit - usage + (_field(group / "memory.stat", inactive_field) or 0)))
    return min(left)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Memory that this process's control groups leave it, used or not; None for all of the machine's."""
    limits = []
    for version, group in _groups("memory", root):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / _MEMORY_FILES[version][0]).read_text()))
    limit = min(limits, default=None)
    machine = _field(root / "proc/meminfo", "MemTotal:")
    # Without a limit version 1 has the largest number that there is.
    return None if limit is None or machine is None or limit >= machine * 1024 else limit


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and directory of each control group of this process that may limit it, the process's own first."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            version, mounts = 2, [mount, mount / "unified"]
        elif controller in controllers.split(","):
            # Mounted by all names of the line, such as cpu,cpuacct, or by one.
            version, mounts = 1, [mount / controllers, mount / controller]
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        if ".." in group.parts:
            # The process was moved out of the groups that its container sees.
            group = PurePosixPath()
        for inside in (group, *group.parents):
            yield from ((version, each / inside) for each in mounts)


def _siblings(cpu: int, root: Path) -> str:
    """A name of the CPU's core: Linux's list of the core's CPUs; the CPU's own number where that cannot be read."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _field(file: Path, name: str) -> int | None:
    """The number after a name that begins a line; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return None


def _counted(number: float, what: str) -> str:
    return f"{number:.4g} {what}{'' if number == 1 else 's'}"
