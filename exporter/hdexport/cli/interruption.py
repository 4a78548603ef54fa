"""Commands that are stopped clean up and say what they kept: SIGTERM and SIGHUP act as Ctrl-C does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

_STOPPING = (signal.SIGTERM, signal.SIGHUP)

_SIGNALLED = 128
"""Exit code of a command that a signal stopped, less the signal's number: shells report such a process so."""

READER_GONE = _SIGNALLED + signal.SIGPIPE
"""Exit code where the output is the result and its reader goes away, as of ``cat`` in ``cat FILE | head``."""

_AGAIN_SECONDS = 0.01
"""After which an interruption comes again that Python has forgotten."""


@contextlib.contextmanager
def stopped_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt with their number, so that all code cleans up as after Ctrl-C.

    A signal that is ignored stays ignored: ``nohup`` ignores SIGHUP, and shells ignore SIGINT for background commands.
    A signal that the calling program handles stays with its handler. A signal that arrives while Python runs a
    destructor or the callback of a weak reference, whose exceptions it prints and forgets, interrupts after that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread handle signals
        return
    handled = [number for number in _STOPPING if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> NoReturn:
        # A second signal, as terminals and service managers send, must not interrupt the cleanup. Ctrl-C still does.
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    def interrupt_again(forgotten: sys.UnraisableHookArgs) -> None:
        stop = forgotten.exc_value
        if not isinstance(stop, KeyboardInterrupt):
            report(forgotten)
            return
        for number in handled:
            signal.signal(number, interrupt)
        again[:] = [threading.Timer(_AGAIN_SECONDS, send_again, (exit_code(stop) - _SIGNALLED,))]
        again[0].start()

    def send_again(number: int) -> None:
        # An error that is raised in the hook is forgotten, too: only when Python has left the hook.
        main = threading.main_thread().ident or 0
        while any(
            frame.f_code is interrupt_again.__code__ for frame, _ in traceback.walk_stack(sys._current_frames()[main])
        ):
            time.sleep(_AGAIN_SECONDS)
        os.kill(os.getpid(), number)

    again: list[threading.Timer] = []
    report, sys.unraisablehook = sys.unraisablehook, interrupt_again
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    except ImportError as error:
        # The error of a compiled module whose initialisation was interrupted.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise
    finally:
        sys.unraisablehook = report
        for timer in again:
            timer.cancel()
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def exit_code(stop: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return _SIGNALLED + (stop.args[0] if stop.args else signal.SIGINT)


@contextlib.contextmanager
def interruption_explained(kept: Callable[[], str]) -> Iterator[None]:
    """Say what is kept, in the words that ``kept`` returns, if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(exit_code(stop) - _SIGNALLED, kept()) from None


def whole_or_nothing(output: Path) -> contextlib.AbstractContextManager[None]:
    """Tell the state of ``output`` if the block is interrupted: the block writes it whole or not at all."""
    before = _identity(output)

    def kept() -> str:
        if _identity(output) != before:
            return f"{output} is complete"
        return "nothing was kept" if before is None else f"{output} is unchanged"

    return interruption_explained(kept)


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
