"""A command in its process: standard streams that close, signals that stop it, and memory that runs out."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hdexport.support.memory import says_out_of_memory
from hdruntime.errors import InputError

_STOPPING = (signal.SIGTERM, signal.SIGHUP)

_SIGNALLED = 128
"""Exit code of a command that a signal stopped, less the signal's number: shells report such a process so."""

READER_GONE = _SIGNALLED + signal.SIGPIPE
"""Exit code where the output is the result and its reader goes away, as of ``cat`` in ``cat FILE | head``."""

_AGAIN_SECONDS = 0.01
"""After which an interruption comes again that Python has forgotten."""

_ALSO_OUT_OF_MEMORY = (
    "failed to map segment",  # the loader of shared libraries
    "can't start new thread",  # Python, which had no room for its stack
    "can't load unicodedata module",  # Python, which compiles a name of a character with it
)
"""Words of errors for memory that ran out, beside those that `says_out_of_memory` knows."""


def prepare_streams() -> None:
    """Make the streams such that any text can be printed; InputError if the standard output is closed."""
    _fill_closed_descriptors()
    # None where one was closed when Python started; `print(file=None)` would print to the standard output.
    has_output = sys.stdout is not None
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths and names hold characters that an ASCII locale lacks, and bytes that are not text.
            stream.reconfigure(errors="backslashreplace")
    if not has_output:
        raise InputError(
            "The standard output is closed, so nothing can be printed.", hint="Send it elsewhere: > /dev/null"
        )


def outlive_readers() -> None:
    """Drop output after the reader of a standard stream has gone, as in ``hdexport build MODEL | head``.

    For commands whose result is not their output; the others end, with `READER_GONE`.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and _descriptor(stream) == number:  # not a calling program's stream
            stream.flush()
            lasting = io.BufferedWriter(_LastingFile(number, "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(lasting, stream.encoding, stream.errors, line_buffering=True))


class _LastingFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _send_nowhere(self.fileno())
            return super().write(data)


def complain(text: str) -> None:
    """Print to the standard error, unless its reader is gone or its terminal hung up."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def reader_is_gone() -> bool:
    """Whether the standard output is a pipe without a reader."""
    descriptor = _descriptor(sys.stdout)
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def finish_output() -> None:
    """Flush the standard output, and drop what cannot be written: Python would fail again as it ends."""
    with contextlib.suppress(ValueError):
        try:
            sys.stdout.flush()
            if not reader_is_gone():
                return
        except OSError:
            pass
        _send_nowhere(sys.stdout.fileno())


def _send_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # not a file, as in a notebook
        return None


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _fill_closed_descriptors() -> None:
    """Open closed descriptors among 0 to 2: else one of our files gets the number, and C++'s prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


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
        stat = directory.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_ctime_ns


def want_of_memory(error: Exception) -> str | None:
    """A message if the error is about a lack of memory, else None."""
    text = str(error)
    if isinstance(error, SystemError) and _address_limit() is not None:
        # Python 3.11 has no exception where it gets no memory while it compiles or reads a module.
        text = "Python could not load a module"
    elif not (
        isinstance(error, MemoryError) or says_out_of_memory(text) or any(part in text for part in _ALSO_OUT_OF_MEMORY)
    ):
        return None
    # NumPy's message is a page about broken installations, which ends with the error.
    detail = next((line for line in reversed(text.splitlines()) if line.strip()), "Python could not allocate any")
    return f"There is not enough memory: {detail}\n{_advice()}"


def interrupted_by_openblas() -> str | None:
    """A message if OpenBLAS got no memory for its threads while NumPy was loaded, else None.

    OpenBLAS prints its own words and interrupts the process as Ctrl-C does.
    """
    if _address_limit() is None or "numpy" in sys.modules:
        return None
    return f"There is not enough memory: NumPy could not be loaded.\n{_advice()}"


def _advice() -> str:
    limit = _address_limit()
    if limit is None:
        return "Free memory, or use a machine that has more."
    return f"This process may have {limit / 1e6:.0f} MB of addresses; raise the limit: ulimit -v unlimited"


def _address_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
