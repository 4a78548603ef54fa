"""A script that runs a command, and kills all that it started when the command or the waiting process ends.

`hdexport.bench.measure.processes` runs it as ``python -I -S process_guard.py LIFELINE COMMAND...``, on the standard
library alone, so that it starts in milliseconds. LIFELINE is the reading end of a pipe whose other end only the waiting
process has: when that process closes it or dies, by any signal, the pipe ends. The guard ends as the command did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_ZOMBIE = b"Z"
_KILL_AGAIN_SECONDS = 0.01


def main(arguments: Sequence[str]) -> int:
    lifeline, command = int(arguments[0]), arguments[1:]
    _prepare()
    process = subprocess.Popen(command)
    threading.Thread(target=_kill_at_end, args=(lifeline, process), daemon=True).start()
    code = process.wait()
    _kill_descendants()
    return code if code >= 0 else _end_by(-code)


def descendants(ancestor: int) -> list[int]:
    """Ids of running processes that a process started, directly or not; [] where there is no ``/proc``."""
    children: dict[int, list[int]] = defaultdict(list)
    running = set()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ())):
        with contextlib.suppress(OSError):
            # "12 (a name) S 3 ...", where the name may hold anything.
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            children[int(parent)].append(pid)
            if state != _ZOMBIE:
                running.add(pid)
    found = [ancestor]
    for pid in found:
        found += children[pid]
    return [pid for pid in found[1:] if pid in running]


def _prepare() -> None:
    if sys.platform != "linux":
        return
    # Processes that the command started and left behind become the guard's, also if they began a session of their own.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The command inherits it, so that the kernel, if it has to kill a process, chooses one of these.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _kill_at_end(lifeline: int, process: subprocess.Popen[bytes]) -> None:
    os.read(lifeline, 1)
    process.kill()
    _kill_descendants()


def _kill_descendants() -> None:
    # Repeated, because a killed process may just have started another.
    while found := descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_AGAIN_SECONDS)


def _end_by(number: int) -> int:
    """Ends by a signal, as the command did."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler that could be reset
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
