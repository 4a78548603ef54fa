"""The folder ``.OUT.job`` beside an output: the state of its job, and afterwards the record that the job is done.

================== ====================================================================================
file               content
================== ====================================================================================
``job.json``       identity of the job
``manifest.json``  position in the inputs, counts, and checksums of the files below; replaced atomically
``results``        results of finished shards, in the order of the rows; appended to
``partial``        finished rows of the shard that runs; appended to
``ranges.json``    calibration ranges of int8 and uint8 embeddings
``output``         the output before it is moved into place, a file or a directory
``lock``           locked by the process that runs the job
================== ====================================================================================

When the output is in place, ``job.json``, ``manifest.json`` and ``lock`` stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from hdruntime.errors import DamagedJobError, HdexportError, OutputExistsError, Setting
from hdruntime.jobs.checksums import Checksum, values_with_checksum
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.progress import JobManifest, PartialEntry, json_from_manifest, manifest_from_json

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

JOB_FILE = "job.json"
MANIFEST_FILE = "manifest.json"
RESULTS_FILE = "results"
PARTIAL_FILE = "partial"
RANGES_FILE = "ranges.json"
OUTPUT_FILE = "output"
STORED_RANGES_FILE = "ranges.npz"
"""The file of ranges that is moved beside the output."""

LOCK_FILE = "lock"

_REPLACED = "replaced"
"""The directory that the output replaces."""

_TEMPORARY = ".tmp"
"""Suffix of a file while it is written."""

_RECORDS = (JOB_FILE, MANIFEST_FILE)
_WORK_FILES = (PARTIAL_FILE, RESULTS_FILE, OUTPUT_FILE, _REPLACED, RANGES_FILE, STORED_RANGES_FILE)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)

START_OVER = ("Start over with ", Setting("restart", True), ".")
CHANGE_OUTPUT = ("change ", Setting("output"), ".")


class StateFolder:
    """The state of a job on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def identity(self) -> Identity:
        """The identity of the folder's job; empty if there is no job."""
        return self._decoded(JOB_FILE, values_with_checksum, {})

    def manifest(self) -> JobManifest:
        """The manifest; the default one before the first commit."""
        return self._decoded(MANIFEST_FILE, manifest_from_json, JobManifest())

    def write_manifest(self, manifest: JobManifest) -> None:
        """Replace the manifest."""
        self.write(MANIFEST_FILE, json_from_manifest(manifest))

    def ranges(self, written: Checksum | None) -> npt.NDArray[np.float32] | None:
        """[2, dimensions], minimum and maximum for quantized vectors; None if no finished row needs ranges.

        Other ranges would give the remaining rows another scale than the finished ones.
        """
        return None if written is None else np.array(json.loads(self._content(RANGES_FILE, written)), np.float32)

    def partial(self, entry: PartialEntry) -> bytes:
        """The finished rows of the shard that runs."""
        return self._content(PARTIAL_FILE, entry.file)

    def has(self, name: str) -> bool:
        """Whether the folder has a file or directory of that name."""
        return os.path.lexists(self.path / name)

    def size_bytes(self, name: str) -> int:
        """Size of a file; 0 if there is none."""
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return 0

    def open_for_appending(self, name: str) -> int:
        """The descriptor of a file, which is made if there is none."""
        try:
            return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except IsADirectoryError as error:
            raise damaged(self.path, f"{name} is a directory") from error

    def write(self, name: str, text: str) -> None:
        """Replace a file by a text."""
        with self.replacing(name) as file:
            file.write(text.encode())

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """Replace a file atomically, even if the machine stops."""
        temporary = self.path / (name + _TEMPORARY)
        with synced(temporary) as file:
            yield file
        try:
            os.replace(temporary, self.path / name)
        except IsADirectoryError as error:
            raise damaged(self.path, f"{name} is a directory") from error

    def move_out(self, path: Path, target: Path) -> None:
        """Move a file or directory of this folder to the output's place, durably."""
        if path.is_dir() and target.exists():
            # A directory takes the place of nothing but an empty directory.
            remove(self.path / _REPLACED)
            os.replace(target, self.path / _REPLACED)
        os.replace(path, target)
        sync(target.parent)

    def put_back(self, target: Path) -> None:
        """Put back the directory at the output's place if a process was killed while it replaced the directory."""
        if self.has(_REPLACED) and not os.path.lexists(target):
            os.replace(self.path / _REPLACED, target)
            sync(target.parent)

    def remove_work_files(self) -> None:
        """Remove everything but the records of the job and the lock."""
        for name in _WORK_FILES:
            remove(self.path / name)
            remove(self.path / (name + _TEMPORARY))

    def clear(self) -> None:
        """Remove every file of the job but the lock; without the records, the other files have no meaning."""
        for name in (*_RECORDS, *(record + _TEMPORARY for record in _RECORDS)):
            remove(self.path / name)
        self.remove_work_files()

    def delete(self) -> None:
        self.clear()
        remove(self.path / LOCK_FILE)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _content(self, name: str, written: Checksum) -> bytes:
        content = self._decoded(name, bytes, b"")[: written.size_bytes]
        if Checksum().after(content) != written:
            raise damaged(self.path, f"{name} is missing or has changed")
        return content

    def _decoded(self, name: str, decode: Callable[[bytes], Content], default: Content) -> Content:
        try:
            with open(self.path / name, "rb", opener=_open_without_waiting) as file:
                return decode(file.read())
        except FileNotFoundError:
            return default
        except (ValueError, IsADirectoryError) as error:
            raise damaged(self.path, f"{name}: {error}") from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a named pipe in its place is empty, instead of waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def state_folder_path(output: Path) -> Path:
    """The path of the state folder of an output; for a link, beside its target."""
    target = output.resolve()
    return target.parent / f".{target.name}.job"


def state_folder(output: Path) -> StateFolder | None:
    """The state folder of an output; None if there is none."""
    path = state_folder_path(output)
    if not os.path.lexists(path):
        return None
    with disk_errors_explained(output):
        status, owner = path.lstat(), path.parent.stat().st_uid
    if not stat.S_ISDIR(status.st_mode):
        raise _in_the_way(path, f"a {'link' if path.is_symlink() else 'file'}, not a folder")
    # In a directory that several users may write to, another user's folder may have links to files of this user. The
    # owner of the directory controls the output anyway; a mounted directory may have only that one owner.
    if status.st_uid not in (os.geteuid(), owner):
        raise _in_the_way(path, f"a folder of another user (number {status.st_uid})")
    return StateFolder(path)


@contextlib.contextmanager
def locked_folder(output: Path) -> Iterator[StateFolder]:
    """The state folder of an output, which is made if there is none, for this process alone.

    The kernel releases the lock when this process ends, even by a kill. OutputExistsError if another process holds it.
    """
    path = state_folder_path(output)
    with disk_errors_explained(output), contextlib.suppress(FileExistsError):
        os.mkdir(path)
    folder = state_folder(output)
    with disk_errors_explained(output):
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(lock, path, output)
        assert folder is not None, "it was made"
        yield folder
    finally:
        os.close(lock)


def _acquire(lock: int, path: Path, output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = os.read(lock, 1000).decode(errors="replace")
            raise _held(output, holder or "a process that has just begun") from None
        logger.warning("no lock on %s (%s): make sure that no other job writes %s", path, error, output)
    # An upload removes its folder, with the lock that this process may have opened before.
    if os.fstat(lock).st_nlink == 0:
        raise _held(output, "a process that has just ended")
    # For the message to others; a full disk does not matter here.
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())


def damaged(folder: Path, reason: str) -> DamagedJobError:
    """The error for a folder whose job cannot be continued."""
    return DamagedJobError(f"The unfinished job in {folder} is damaged: {reason}.", hint=START_OVER)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Write a file that is on the disk at the end of the block."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Make renames and removals in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors_explained(output: Path) -> Iterator[None]:
    """Turn an OSError into an HdexportError that names the output and says what to do."""
    try:
        yield
    except OSError as error:
        raise HdexportError(
            f"{output} could not be written: {error.strerror or error}.",
            hint="Free some space there; then the same command continues."
            if error.errno in _NO_SPACE
            else ("Check the permissions there, or ", *CHANGE_OUTPUT),
        ) from error


def _in_the_way(path: Path, what: str) -> HdexportError:
    return HdexportError(f"{path} is {what}. A job keeps its results there.", hint=("Remove it, or ", *CHANGE_OUTPUT))


def _held(output: Path, holder: str) -> OutputExistsError:
    return OutputExistsError(
        f"Another job is writing {output}: {holder}.", hint=("Wait until it ends, or ", *CHANGE_OUTPUT)
    )
