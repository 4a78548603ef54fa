"""Directories appear whole or not at all: a temporary sibling, renamed into place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hdruntime.errors import HdexportError, Message, OutputExistsError, Setting, joined
from hdruntime.os_errors import is_full_disk, next_step, reason_of

logger = logging.getLogger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""renameat2(2), Linux 3.15: exchange two paths in one step, so that neither name is ever missing."""

_LONG_NAME_BYTES, _PART_OF_NAME = 200, 40
"""Siblings of a longer name have so many of its characters: a name has at most 255 bytes, and a character four."""


@dataclass(frozen=True, kw_only=True)
class DirectoryKind:
    """A kind of directory. Only a directory of the kind may replace a directory of the kind.

    Attributes:
        name: name of the kind in messages, e.g. ``bundle of hdexport``.
        marker: file that every directory of the kind has.
        is_one: whether an existing directory is of the kind.
        other_files: files in such a directory that are not part of it, which replacing the directory would delete.
        other_place: hint to choose another place.
        other_parent: hint to choose another directory to write in; None where `other_place` does.
    """

    name: str
    marker: str
    is_one: Callable[[Path], bool]
    other_files: Callable[[Path], list[str]]
    other_place: Message = ("choose another place with ", Setting("output"))
    other_parent: Message | None = None


@contextlib.contextmanager
def staged_directory(destination: Path, kind: DirectoryKind, *, force: bool) -> Iterator[Path]:
    """A temporary sibling directory that replaces `destination` when the block ends cleanly.

    Fill it in the block. If the block raises, the temporary directory is removed and a directory at `destination`
    stays. A process that is killed leaves a hidden directory, which the next call for the same `destination` removes. A
    symbolic link at `destination` is followed. A path that exists and may not be replaced is rejected before the
    block runs: `force` replaces a directory of that kind and nothing else.
    """
    destination = Path(destination).resolve()
    require_replaceable(destination, kind, force=force)
    with _parent_made(destination.parent, kind):
        _remove_stale(destination)
        partial = _sibling(destination, "partial")
        try:
            _make(partial, kind)
            with _full_disk_explained(partial, destination, kind), locked_directory(partial, wait=False):
                yield partial
                assert (partial / kind.marker).is_file(), f"the staged directory has no {kind.marker}"
                # A power cut cannot leave empty files.
                for path in (*partial.rglob("*"), partial):
                    _sync_path(path)
                _move_into_place(partial, destination, kind, force=force)
                # A rename is durable once its directory is.
                _sync_path(destination.parent)
        finally:
            # Still there after an error; after an exchange it holds the replaced directory.
            _remove(partial)


@contextlib.contextmanager
def locked_directory(directory: Path, *, wait: bool) -> Iterator[None]:
    """Hold a directory's lock, which the kernel drops when this process dies, however it dies.

    The lock is of the directory, not of its path: a directory that replaces it is not locked. `wait` until no other
    process holds it; False where none can, or the file system has no locks.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            # Without locks no process can prove that this one is dead, so none removes its directory.
            logger.debug("no lock on %s: %s", directory, error)
        yield
    finally:
        os.close(descriptor)


def require_replaceable(destination: Path, kind: DirectoryKind, *, force: bool) -> None:
    """Reject a destination that `staged_directory` would not replace; for a check before long work."""
    if not os.path.lexists(destination):
        return
    if not (destination.is_dir() and kind.is_one(destination)):
        raise OutputExistsError(
            f"{destination} exists and is not a {kind.name}, so ",
            Setting("force", True),
            " does not replace it either.",
            hint=joined("Remove it yourself, or ", kind.other_place, "."),
        )
    if not force:
        raise OutputExistsError(
            f"{destination} exists.",
            hint=joined("Replace it with ", Setting("force", True), ", or ", kind.other_place, "."),
        )
    others = kind.other_files(destination)
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise OutputExistsError(
            f"{destination} contains files that are not part of a {kind.name} ({shown}); ",
            Setting("force", True),
            " would delete them.",
            hint=joined("Move them away, or ", kind.other_place, "."),
        )


@contextlib.contextmanager
def _full_disk_explained(partial: Path, destination: Path, kind: DirectoryKind) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_full_disk(error, destination.parent):
            raise
        written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        raise HdexportError(
            f"The disk is full: {error}; {destination} was not written, and needs more than {written / 1e6:.1f} MB.",
            hint=joined("Free some space there, or ", kind.other_parent or kind.other_place, "."),
        ) from error


@contextlib.contextmanager
def _parent_made(parent: Path, kind: DirectoryKind) -> Iterator[None]:
    """Make the directory and its parents; if the block raises, remove the directories that were made."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        _make(parent, kind, parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # another process put something there: it stays
                path.rmdir()
        raise


def _make(directory: Path, kind: DirectoryKind, *, parents: bool = False, exist_ok: bool = False) -> None:
    try:
        directory.mkdir(parents=parents, exist_ok=exist_ok)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else reason_of(error)
        step = next_step(error)
        raise HdexportError(
            f"The directory {directory} cannot be created: {reason}.",
            hint=joined(
                "To write elsewhere, " if step is None else f"{step}\nOr ", kind.other_parent or kind.other_place, "."
            ),
        ) from error


def _sibling(destination: Path, kind: str) -> Path:
    # The process id helps a person who finds the directory; the random part separates threads, and
    # containers that share a volume and all run as process 1.
    return destination.with_name(f"{_prefix(destination, kind)}{os.getpid()}-{secrets.token_hex(4)}")


def _prefix(destination: Path, kind: str) -> str:
    """The name of a sibling up to the process id, of less than 255 bytes for every name."""
    name = destination.name
    if len(os.fsencode(name)) > _LONG_NAME_BYTES:
        name = f"{name[:_PART_OF_NAME]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}.{kind}-"


def _remove_stale(destination: Path) -> None:
    """Remove directories that killed processes left beside ``destination``."""
    kinds = ["partial"]
    if destination.exists():
        # A process killed between the two renames of the fallback leaves the only copy under this name.
        kinds.append("replaced")
    prefixes = tuple(_prefix(destination, kind) for kind in kinds)
    for path in destination.parent.iterdir():
        if path.name.startswith(prefixes) and path.is_dir() and not path.is_symlink() and _is_abandoned(path):
            logger.info("removing %s, left by a build that was killed", path)
            _remove(path)


def _is_abandoned(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False  # gone already, or of another user
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its writer lives, or the file system cannot tell
    finally:
        os.close(descriptor)
    return True


def _move_into_place(partial: Path, destination: Path, kind: DirectoryKind, *, force: bool) -> None:
    if not os.path.lexists(destination):
        try:
            partial.rename(destination)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise OutputExistsError(
                    f"{destination} was created by another process in the meantime.",
                    hint=joined(
                        "Look at it, and replace it with ", Setting("force", True), " or ", kind.other_place, "."
                    ),
                ) from error
            raise
        return
    # The destination may have appeared or changed while the block ran.
    require_replaceable(destination, kind, force=force)
    if not _exchange(partial, destination):
        _replace_in_two_steps(partial, destination)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically; False where the C library, kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _replace_in_two_steps(partial: Path, destination: Path) -> None:
    """Replace without an exchange: the old directory is kept, renamed, until the new one is in place."""
    replaced = _sibling(destination, "replaced")
    destination.rename(replaced)
    try:
        partial.rename(destination)
    except BaseException:
        replaced.rename(destination)
        raise
    _remove(replaced)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("could not remove %s: %s", directory, error)
