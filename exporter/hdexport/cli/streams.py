"""The standard streams of a command: closed ones, readers that go away, and encodings that lack characters."""

from __future__ import annotations

__all__ = ["complain", "finish_output", "prepare_streams", "reader_is_gone"]

import contextlib
import io
import os
import select
import sys
from typing import TextIO

from hdruntime.errors import InputError


def prepare_streams() -> None:
    """Make the streams such that whatever is printed can be.

    Raises:
        InputError: the standard output is closed.
    """
    _fill_closed_descriptors()
    # None where one was closed when Python started; `print(file=None)` would print to the standard output.
    has_output = sys.stdout is not None
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths and names have characters that an ASCII locale has not, and bytes that are none.
            stream.reconfigure(errors="backslashreplace")
    if not has_output:
        raise InputError("The standard output is closed, so nothing can be printed.\nSend it elsewhere: > /dev/null")


def complain(text: str) -> None:
    """Print to the standard error, unless nobody is there: a terminal that hung up takes no more."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def reader_is_gone() -> bool:
    """Whether the standard output is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file, as in a notebook
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def finish_output() -> None:
    """Flush the standard output; what cannot be written goes nowhere, else Python would fail once more as it ends."""
    with contextlib.suppress(ValueError):
        try:
            sys.stdout.flush()
            if not reader_is_gone():
                return
        except OSError:
            pass
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _fill_closed_descriptors() -> None:
    """Open what is closed of the descriptors 0 to 2: else a file of ours got one of them, and what C++ prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
