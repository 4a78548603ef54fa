"""Ordinary files told from pipes, sockets and devices, which would make a job wait for ever or read without end."""

from __future__ import annotations

__all__ = ["opened_input", "special_kind"]

import os
import stat
from pathlib import Path
from typing import BinaryIO

from hdruntime.errors import InputError

_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def special_kind(status: os.stat_result) -> str | None:
    """What a person calls it, where it is neither a file nor a directory."""
    return next((name for is_one, name in _SPECIAL if is_one(status.st_mode)), None)


def opened_input(path: Path) -> BinaryIO:
    """A file to be read from its start.

    Raises:
        InputError: it is a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    _require_file(path, path.stat())
    # Should a pipe take the file's place this very moment, it does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_file(path, os.fstat(descriptor))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_file(path: Path, status: os.stat_result) -> None:
    kind = special_kind(status)
    if kind is not None:
        raise InputError(
            f"{path} is {kind}; a job reads files, which it can read again when it goes on.\n"
            "Write the rows to a file first, and give that."
        )
