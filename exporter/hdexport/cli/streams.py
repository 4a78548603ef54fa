"""The standard streams of a command: closed ones, readers that go away, and encodings that lack characters."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO

from hdruntime.errors import InputError


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
        raise InputError("The standard output is closed, so nothing can be printed.\nSend it elsewhere: > /dev/null")


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
