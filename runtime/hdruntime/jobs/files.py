"""The files of a job's folder: how they are opened, locked, read, replaced and removed."""

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

from hdruntime.errors import DamagedJobError, HdexportError, OutputExistsError
from hdruntime.jobs.checksums import Checksum, checksum_of, values_with_checksum
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.progress import Saved, SavedPart, saved_from_json

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

JOB_FILE = "job.json"
SAVED_FILE = "progress.json"
RESULTS_FILE = "results"
RANGES_FILE = "ranges.json"
PART_FILE = "part"
"""Rows of the shard that runs, see `hdruntime.jobs.part_file`."""

FINISHED_FILE = "finished"
"""The whole output, a file or a directory of files."""

REPLACED = "replaced"
"""The directory that the output has replaced."""

STORED_RANGES = "ranges.npz"
"""The file of ranges that is moved beside the output."""

LOCK_FILE = "lock"
_FILES = (JOB_FILE, SAVED_FILE, RANGES_FILE, PART_FILE, RESULTS_FILE, FINISHED_FILE, STORED_RANGES, REPLACED, LOCK_FILE)
"""The files of the folder, in the order of removal, each also with `_PARTIAL`. Without the first, the others mean
nothing; while the last exists, no other process begins."""

_PARTIAL = ".partial"
"""Ending of a file while it is written."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_NO_DIRECTORY = (errno.ELOOP, errno.ENOTDIR)
"""Errors of opening a link or a file as a directory."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)

_ATTEMPTS = 100
"""Attempts to lock a folder that its owner removes meanwhile; more than one is rare."""


def job_folder_path(output: Path) -> Path:
    """The folder of an output's job; for a link, beside its target."""
    target = output.resolve()
    return target.parent / f".{target.name}.job"


@contextlib.contextmanager
def opened_folder(output: Path, *, make: bool = False) -> Iterator[OpenFolder | None]:
    """The folder of an output's job; None if it does not exist and is not to be made. A link or another user's folder
    in its place is an HdexportError.
    """
    path = job_folder_path(output)
    with contextlib.ExitStack() as exits:
        with disk_errors_explained(output):
            try:
                parent = os.open(path.parent, _DIRECTORY)
                exits.callback(os.close, parent)
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(path.name, dir_fd=parent)
                descriptor = os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
                exits.callback(os.close, descriptor)
            except FileNotFoundError:
                descriptor = None
            except OSError as error:
                if error.errno in _NO_DIRECTORY and os.path.lexists(path):
                    raise _in_the_way(path, f"a {'link' if path.is_symlink() else 'file'}, not a folder") from None
                raise
        if descriptor is not None:
            # The owner of the directory controls the output anyway; a mounted directory may have only that one owner.
            owner = os.fstat(descriptor).st_uid
            if owner not in (os.geteuid(), os.fstat(parent).st_uid):
                raise _in_the_way(path, f"a folder of another user (number {owner})")
        yield None if descriptor is None else OpenFolder(path, descriptor, parent)


def damaged(folder: Path, reason: str) -> DamagedJobError:
    """The error for a folder that does not hold an unfinished job."""
    return DamagedJobError(f"The unfinished job in {folder} is damaged: {reason}.", hint="Start over with --restart.")


class OpenFolder:
    """The folder of a job, by descriptors of it and of its parent: no link is followed, even if one replaces the folder
    or a file in it.
    """

    def __init__(self, path: Path, descriptor: int, parent: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._parent = parent

    def identity(self) -> Identity:
        """The job of the folder; empty if it has none."""
        return self._decoded(JOB_FILE, values_with_checksum, {})

    def saved(self) -> Saved:
        """The saved rows; nothing if no row is kept."""
        return self._decoded(SAVED_FILE, saved_from_json, Saved())

    def ranges(self, written: Checksum | None) -> npt.NDArray[np.float32] | None:
        """[2, dimensions], minimum and maximum for quantised vectors; None if no kept row needs them.

        Other ranges would give the remaining rows another scale than the kept ones.
        """
        return None if written is None else np.array(json.loads(self._content(RANGES_FILE, written)), np.float32)

    def part(self, saved: SavedPart) -> bytes:
        """The rows of a shard that runs."""
        return self._content(PART_FILE, saved.file)

    def _content(self, name: str, written: Checksum) -> bytes:
        """What was written to a file; an error if it is not there any more."""
        content = self._decoded(name, bytes, b"")[: written.size_bytes]
        if Checksum().after(content) != written:
            raise damaged(self.path, f"{name} is missing or has changed")
        return content

    def checksum_of_output(self) -> Checksum:
        """The checksum of the whole output in the folder."""
        descriptor = self.open(FINISHED_FILE, os.O_RDONLY, may_be_directory=True)
        try:
            return checksum_of(descriptor)
        finally:
            os.close(descriptor)

    def is_published(self) -> bool:
        """Whether the output of a complete job was moved into place."""
        return self.saved().output is not None and not (self.has(RESULTS_FILE) or self.has(FINISHED_FILE))

    def has(self, name: str) -> bool:
        """Whether the name exists."""
        return self._status(name) is not None

    def size_bytes(self, name: str) -> int:
        """Size of a file; 0 if it does not exist."""
        status = self._status(name)
        return 0 if status is None else status.st_size

    def holds(self, name: str, descriptor: int) -> bool:
        """Whether an open file is the one with that name."""
        status = self._status(name)
        return status is not None and os.path.samestat(status, os.fstat(descriptor))

    def is_in_place(self) -> bool:
        """Whether the folder is still where it was opened."""
        try:
            found = os.stat(self.path.name, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._descriptor))

    def open(self, name: str, flags: int, *, may_be_directory: bool = False) -> int:
        """The descriptor of a file; HdexportError for a link, a special file, or one with another hard link."""
        try:
            # O_NONBLOCK: do not wait for the other end of a pipe.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o666, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._unfit(name, "a link") from None
            if error.errno == errno.EISDIR:
                raise self._unfit(name, "a directory") from None
            raise
        status = os.fstat(descriptor)
        if may_be_directory and stat.S_ISDIR(status.st_mode):
            return descriptor
        # A second hard link may be another program's file; a file without any was just removed.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise self._unfit(name, "not a regular file, or has another hard link")
        return descriptor

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """Replace a file atomically, even if the machine stops."""
        partial = name + _PARTIAL
        self.remove(partial)
        with open(self.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.rename(partial, name)

    @contextlib.contextmanager
    def filling(self) -> Iterator[Callable[[str], contextlib.AbstractContextManager[BinaryIO]]]:
        """Make the output as a directory of files, which appears whole, even if the machine stops; gives a function
        that opens a new file.
        """
        partial = FINISHED_FILE + _PARTIAL
        self.remove(partial)
        os.mkdir(partial, dir_fd=self._descriptor)
        directory = os.open(partial, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._descriptor)

        @contextlib.contextmanager
        def opened(file: str) -> Iterator[BinaryIO]:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(file, flags, 0o666, dir_fd=directory), "wb") as part:
                yield part
                part.flush()
                os.fsync(part.fileno())

        try:
            yield opened
            os.fsync(directory)
        finally:
            os.close(directory)
        self.rename(partial, FINISHED_FILE)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any of that name."""
        try:
            os.replace(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.EISDIR:
                raise self._unfit(new, "a directory") from None
            raise

    def move_out(self, target: Path, name: str = FINISHED_FILE) -> None:
        """Move the output, or another file, to a place beside the folder, durably."""
        status = self._status(name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            # A directory takes the place of nothing but an empty directory.
            self.remove(REPLACED)
            with contextlib.suppress(FileNotFoundError):
                os.replace(target.name, REPLACED, src_dir_fd=self._parent, dst_dir_fd=self._descriptor)
        os.replace(name, target.name, src_dir_fd=self._descriptor, dst_dir_fd=self._parent)
        os.fsync(self._parent)

    def sync(self) -> None:
        """Make renames and removals durable."""
        os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file or a directory, if it exists."""
        status = self._status(name)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)
            return
        shutil.rmtree(name, dir_fd=self._descriptor)

    def remove_all(self, *, keep: tuple[str, ...] = ()) -> None:
        """Remove our files, and the folder unless it still holds others."""
        for name in _FILES:
            self.remove(name + _PARTIAL)
            if name not in keep:
                self.remove(name)
        if not keep and self.is_in_place():
            with contextlib.suppress(OSError):
                os.rmdir(self.path.name, dir_fd=self._parent)

    def _unfit(self, name: str, what: str) -> HdexportError:
        said = f"{self.path / name} is {what}; a job uses nothing but regular files of its own folder.\n"
        # --restart does not remove the lock.
        return (
            HdexportError(f"{said}Remove it.")
            if name == LOCK_FILE
            else DamagedJobError(f"{said}Start over with --restart.")
        )

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _decoded(self, name: str, decode: Callable[[bytes], Content], default: Content) -> Content:
        try:
            with open(self.open(name, os.O_RDONLY), "rb") as file:
                return decode(file.read())
        except FileNotFoundError:
            return default
        except ValueError as error:
            raise damaged(self.path, f"{name}: {error}") from error


def _in_the_way(path: Path, what: str) -> HdexportError:
    return HdexportError(
        f"{path} is {what}. A job keeps its results there.", hint="Remove it, or choose another place with -o."
    )


@contextlib.contextmanager
def disk_errors_explained(output: Path) -> Iterator[None]:
    """Turn an OSError into an HdexportError that says what it means for the output, and the remedy."""
    try:
        yield
    except OSError as error:
        advice = (
            "Free some space there; then the same command continues."
            if error.errno in _NO_SPACE
            else "Check the permissions there, or choose another place with -o."
        )
        raise HdexportError(f"{output} could not be written: {error.strerror or error}.", hint=advice) from error


@contextlib.contextmanager
def locked_folder(output: Path) -> Iterator[tuple[OpenFolder, int]]:
    """The folder of an output's job, created if it does not exist, and the descriptor of its lock, which is held.

    The kernel releases the lock when this process ends, even by a kill. OutputExistsError if another process holds it.
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
    raise _held(output, "one that begins and ends repeatedly")


def _acquired(folder: OpenFolder, output: Path) -> int | None:
    """The descriptor of a lock that is held; None if its owner removed it meanwhile."""
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
        logger.warning("no lock on %s (%s): make sure that no other job writes %s", folder.path, error, output)
    if not folder.holds(LOCK_FILE, descriptor):
        os.close(descriptor)
        return None
    # For the message to others; a full disk does not matter here.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def _held(output: Path, holder: str) -> OutputExistsError:
    return OutputExistsError(
        f"Another job is writing {output}: {holder}.", hint="Wait for its end, or choose another place with -o."
    )
