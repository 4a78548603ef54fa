"""Script that runs a command, and kills its descendants when the command or the waiting process ends.

`hdexport.bench.measure.processes` runs it as ``python -I -S process_guard.py LIFELINE COMMAND...``. It imports only the
standard library, so that it starts in milliseconds. LIFELINE is the reading end of a pipe; only the waiting process has
the other end. When the waiting process closes that end or dies, by any signal, the pipe ends. The guard's exit code or
signal is the command's.
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
    """Ids of running descendants of a process; empty without ``/proc``."""
    children: dict[int, list[int]] = defaultdict(list)
    running = set()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ())):
        with contextlib.suppress(OSError):
            # "12 (a name) S 3 ...", where the name may hold anything.
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            children[int(parent)].append(pid)
            if state != _ZOMBIE:
                running.add(pid)
    family = [ancestor]
    for pid in family:
        family += children[pid]
    return [pid for pid in family[1:] if pid in running]


def _prepare() -> None:
    if sys.platform != "linux":
        return
    # Orphans of the command become children of the guard, even in another session.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The command inherits it: if the kernel has to kill a process, it chooses one of these.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _kill_at_end(lifeline: int, process: subprocess.Popen[bytes]) -> None:
    os.read(lifeline, 1)
    process.kill()
    _kill_descendants()


def _kill_descendants() -> None:
    # Repeated, because a killed process may just have started another.
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_AGAIN_SECONDS)


def _end_by(number: int) -> int:
    """End by the signal that ended the command."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler that could be reset
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
