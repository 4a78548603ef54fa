"""The files of a job's folder: where they are, what they say, and how they are replaced and removed."""

from __future__ import annotations

__all__ = [
    "FINISHED_FILE",
    "JOB_FILE",
    "LOCK_FILE",
    "RANGES_FILE",
    "RESULTS_FILE",
    "SAVED_FILE",
    "OpenFolder",
    "damaged",
    "job_folder_path",
    "opened_folder",
]

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from hdruntime.errors import HdexportError
from hdruntime.jobs.disk_errors import disk_errors_explained
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.saved import Saved, saved_from_json

JOB_FILE = "job.json"
SAVED_FILE = "progress.json"
RESULTS_FILE = "results"
RANGES_FILE = "ranges.json"
FINISHED_FILE = "finished"
LOCK_FILE = "lock"
_FILES = (
    JOB_FILE,
    SAVED_FILE,
    f"{JOB_FILE}.partial",
    f"{SAVED_FILE}.partial",
    f"{RANGES_FILE}.partial",
    RANGES_FILE,
    RESULTS_FILE,
    f"{FINISHED_FILE}.partial",
    FINISHED_FILE,
    LOCK_FILE,
)
"""All that may be in the folder, in the order of its removal. Without the first the others mean nothing; as long as the
last is there, nobody else begins."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_NO_DIRECTORY = (errno.ELOOP, errno.ENOTDIR)
"""What opening a link or a file as a directory gives."""


def job_folder_path(output: Path) -> Path:
    """Where the folder of an output is; where the output is a link, beside what that names."""
    target = output.resolve()
    return target.with_name(f".{target.name}.job")


@contextlib.contextmanager
def opened_folder(output: Path, *, make: bool = False) -> Iterator[OpenFolder | None]:
    """The folder of an output's job; None where there is none.

    Args:
        output: what the job writes.
        make: make the folder, if there is none.

    Raises:
        HdexportError: in its place is something else, such as a link, or it is another user's; or it cannot be opened.
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
            # Whoever owns the directory may do with the output as he likes: with a mounted one, that is its only owner.
            owner = os.fstat(descriptor).st_uid
            if owner not in (os.geteuid(), os.fstat(parent).st_uid):
                raise _in_the_way(path, f"a folder of another user (number {owner})")
        yield None if descriptor is None else OpenFolder(path, descriptor, parent)


def damaged(folder: Path, reason: str) -> HdexportError:
    """What to raise where the folder does not hold what a job leaves."""
    return HdexportError(f"The unfinished job in {folder} is damaged: {reason}.\nStart over with --restart.")


class OpenFolder:
    """The folder of a job, by its descriptor: whatever is put in its place or into it meanwhile, no link is followed.

    Args:
        path: where it is, for messages.
        descriptor: of it.
        parent: descriptor of the directory that it is in.
    """

    def __init__(self, path: Path, descriptor: int, parent: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._parent = parent

    def identity(self) -> Identity:
        """Which job the folder is of; an empty one where it is of none.

        Raises:
            HdexportError: the file is damaged.
        """
        try:
            identity = json.loads(self._content(JOB_FILE) or "{}")
        except ValueError as error:
            raise damaged(self.path, f"{JOB_FILE}: {error}") from error
        if not isinstance(identity, dict):
            raise damaged(self.path, f"{JOB_FILE} holds no object")
        return identity

    def saved(self) -> Saved:
        """What is done; nothing where no row is kept.

        Raises:
            HdexportError: the file is damaged.
        """
        content = self._content(SAVED_FILE)
        try:
            return Saved() if content is None else saved_from_json(content)
        except ValueError as error:
            raise damaged(self.path, f"{SAVED_FILE}: {error}") from error

    def ranges(self) -> npt.NDArray[np.float32] | None:
        """[2, dimensions], what int8 vectors are counted from; None where there are none.

        Raises:
            HdexportError: the file is damaged.
        """
        content = self._content(RANGES_FILE)
        try:
            return None if content is None else np.array(json.loads(content), np.float32)
        except ValueError as error:
            raise damaged(self.path, f"{RANGES_FILE}: {error}") from error

    def is_published(self) -> bool:
        """Whether the output of a complete job was moved into place."""
        return self.saved().complete and not (self.has(RESULTS_FILE) or self.has(FINISHED_FILE))

    def has(self, name: str) -> bool:
        """Whether there is something of that name."""
        return self._status(name) is not None

    def size_bytes(self, name: str) -> int:
        """Of a file; 0 where there is none."""
        status = self._status(name)
        return 0 if status is None else status.st_size

    def holds(self, name: str, descriptor: int) -> bool:
        """Whether an open file is the one of that name."""
        status = self._status(name)
        return status is not None and os.path.samestat(status, os.fstat(descriptor))

    def is_in_place(self) -> bool:
        """Whether the folder is still where it was opened."""
        try:
            found = os.stat(self.path.name, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._descriptor))

    def open(self, name: str, flags: int) -> int:
        """The descriptor of a file.

        Raises:
            HdexportError: what has that name is a link, or no file that is in this folder alone.
            OSError: it cannot be opened.
        """
        try:
            # Of a pipe, neither reader nor writer is waited for.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o666, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._unfit(name, "a link") from None
            raise
        status = os.fstat(descriptor)
        # A file that has another name as well is somebody else's, too; one that has none was removed this moment.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise self._unfit(name, "no file, or one that is elsewhere as well")
        return descriptor

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """Write a file that is the old one or the new one, whenever the machine stops."""
        partial = f"{name}.partial"
        self.remove(partial)
        with open(self.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.rename(partial, name)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, whatever had that."""
        os.replace(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def move_out(self, name: str, target: Path) -> None:
        """Move a file to a place beside the folder, for good."""
        os.replace(name, target.name, src_dir_fd=self._descriptor, dst_dir_fd=self._parent)
        os.fsync(self._parent)

    def sync(self) -> None:
        """Bring what was renamed or removed to the disk."""
        os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def remove_all(self, *, keep: tuple[str, ...] = ()) -> None:
        """Remove our files, and the folder unless something is kept or somebody put something there."""
        for name in _FILES:
            if name not in keep:
                self.remove(name)
        if not keep and self.is_in_place():
            with contextlib.suppress(OSError):
                os.rmdir(self.path.name, dir_fd=self._parent)

    def _unfit(self, name: str, what: str) -> HdexportError:
        # What is locked is not removed even to start over.
        advice = "Remove it." if name == LOCK_FILE else "Start over with --restart."
        return HdexportError(f"{self.path / name} is {what}; a job does not touch what is elsewhere.\n{advice}")

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _content(self, name: str) -> bytes | None:
        try:
            with open(self.open(name, os.O_RDONLY), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None


def _in_the_way(path: Path, what: str) -> HdexportError:
    return HdexportError(
        f"{path} is {what}. A job keeps there what is done.\nRemove it, or choose another place with -o."
    )
