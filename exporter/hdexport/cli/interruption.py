"""Commands that are stopped put down what they have: SIGTERM and SIGHUP are as Ctrl-C."""

from __future__ import annotations

__all__ = ["exit_code", "stopped_like_interrupted"]

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

_STOPPING = (signal.SIGTERM, signal.SIGHUP)

_SIGNALLED = 128
"""Exit code of a command that a signal stopped, less the signal's number: what shells make of such a process."""


@contextlib.contextmanager
def stopped_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, too, with their number, so that everybody cleans up.

    A signal that was ignored stays so: ``nohup`` ignores SIGHUP, and shells SIGINT for what they run in the background.
    So does one that the program around handles.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread handle signals
        return
    handled = [number for number in _STOPPING if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> NoReturn:
        # A second one, as terminals and service managers send, would interrupt the cleaning up. Ctrl-C still does.
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def exit_code(stop: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return _SIGNALLED + (stop.args[0] if stop.args else signal.SIGINT)
