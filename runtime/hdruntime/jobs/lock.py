"""One job at a time on an output: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

__all__ = ["locked_folder"]

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from hdruntime.errors import OutputExistsError
from hdruntime.jobs.disk_errors import disk_errors_explained
from hdruntime.jobs.files import LOCK_FILE, OpenFolder, opened_folder

logger = logging.getLogger(__name__)

_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)

_ATTEMPTS = 100
"""Tries to lock a folder that its owner removes meanwhile; more than one is rare."""


@contextlib.contextmanager
def locked_folder(output: Path) -> Iterator[tuple[OpenFolder, int]]:
    """The folder of an output's job, which is made if there is none, and the descriptor of its lock, which is held.

    The kernel drops the lock when this process dies, however it dies.

    Raises:
        OutputExistsError: another process is at work on this output.
        HdexportError: as `opened_folder`.
    """
    for _ in range(_ATTEMPTS):
        with opened_folder(output, make=True) as folder:
            lock = None if folder is None else _acquired(folder, output)
            if folder is None or lock is None:
                continue
            try:
                yield folder, lock
            finally:
                os.close(lock)
            return
    raise _held(output, "one that begins and ends all the time")


def _acquired(folder: OpenFolder, output: Path) -> int | None:
    """The descriptor of a lock that is held; None where its owner removed it before we had it."""
    with disk_errors_explained(output):
        try:
            descriptor = folder.open(LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise _held(output, holder or "of a process that has just begun") from None
        logger.warning("no lock on %s (%s): see that no other job writes %s", folder.path, error, output)
    if not folder.holds(LOCK_FILE, descriptor):
        os.close(descriptor)
        return None
    # For whom it refuses; a full disk does not stop us here.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def _held(output: Path, holder: str) -> OutputExistsError:
    return OutputExistsError(
        f"Another job is writing {output}: {holder}.\nWait for its end, or choose another place with -o."
    )
