"""A fork of this very process, with whatever its threads hold at that moment."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable


def said_in_a_fork(child: Callable[[], Iterable[str]]) -> list[str]:
    """The lines of a function that runs in a fork, where the process ends with it; a traceback where the function
    fails."""
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for line in child():
                os.write(its, f"{line}\n".encode())
        except BaseException:
            os.write(its, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(its)
    with os.fdopen(ours) as lines:
        said = lines.read().splitlines()
    os.waitpid(pid, 0)
    return said
