"""One job at a time on an output: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

__all__ = ["LOCK_FILE", "held_lock"]

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from hdruntime.errors import OutputExistsError
from hdruntime.jobs.writers import disk_errors_explained

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
"""In the job's folder; names who holds it."""

_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)

_ATTEMPTS = 100
"""Tries to lock a folder that its owner removes meanwhile; more than one is rare."""


@contextlib.contextmanager
def held_lock(folder: Path, output: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made; the kernel drops it when this process dies, however it dies."""
    descriptor = next(filter(None, (_acquired(folder, output) for _ in range(_ATTEMPTS))), None)
    if descriptor is None:
        raise _held(output, "one that begins and ends all the time")
    try:
        yield
    finally:
        os.close(descriptor)


def _acquired(folder: Path, output: Path) -> int | None:
    """The descriptor of a lock that is held; None where its owner removed it before we had it."""
    with disk_errors_explained(output):
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise _held(output, holder or "of a process that has just begun") from None
        logger.warning("no lock on %s (%s): see that no other job writes %s", folder, error, output)
    if not _is_at(folder / LOCK_FILE, descriptor):
        os.close(descriptor)
        return None
    # For whom it refuses; a full disk does not stop us here.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _held(output: Path, holder: str) -> OutputExistsError:
    return OutputExistsError(
        f"Another job is writing {output}: {holder}.\nWait for its end, or choose another place with -o."
    )
