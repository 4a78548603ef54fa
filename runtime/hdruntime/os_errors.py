"""Errors of the operating system as messages say them: the reason, and what to do next."""

from __future__ import annotations

import errno
import shlex
import shutil
import socket
from pathlib import Path

_NEXT_STEPS = {
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "Check the path: one of its folders is a file.",
    errno.EISDIR: "Name a file.",
    errno.ENAMETOOLONG: "Shorten it: a name has at most 255 bytes, and a path 4095.",
    errno.ELOOP: "Name the file or the folder itself: a link in the path leads back to itself.",
    errno.EROFS: "Choose a place that can be written.",
    errno.ENOSPC: "Free some space there, or choose another place.",
    errno.EDQUOT: "Free some space there, or choose another place.",
    errno.EMFILE: "Allow more open files: ulimit -n 65536",
    errno.ECONNREFUSED: "Check the address, and that a program listens there.",
}

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_FULL_BYTES = 2**20
"""A disk with less free space than this is full: one write of a file's buffer may not fit."""

_FORBIDDEN = (errno.EACCES, errno.EPERM)


def reason_of(error: OSError) -> str:
    """Why it failed, without the number of the error and without the path."""
    return error.strerror or str(error)


def is_full_disk(error: OSError, directory: Path) -> bool:
    """Whether a file could not be written in a directory because the disk is full."""
    # NumPy does not say why it could write only so much.
    return error.errno in _NO_SPACE or (error.errno is None and shutil.disk_usage(directory).free < _FULL_BYTES)


def next_step(error: OSError) -> str | None:
    """A sentence that says what to do; None where the error does not tell."""
    if isinstance(error, socket.gaierror):
        return "Check the name of the host, and the connection."
    if error.errno in _FORBIDDEN:
        path = "PATH" if error.filename is None else shlex.quote(str(error.filename))
        return f"Check the permissions there and in the folders above it: ls -ld {path}"
    return _NEXT_STEPS.get(error.errno or 0)


def explained(error: OSError, *, otherwise: str) -> str:
    """The reason and the next step, as the end of a message; `otherwise` is the step where the error tells none."""
    return f"{reason_of(error)}.\n{next_step(error) or otherwise}"
