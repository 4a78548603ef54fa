"""Files below a folder, none of them left out in silence."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from hdruntime.errors import InputError
from hdruntime.os_errors import explained

HIDDEN = (".", "_")
"""First characters of names that are skipped, such as Spark's _SUCCESS."""

_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_MOVE_AWAY = "Move it out of the folder, or name the files that are to be read."


def files_below(folder: Path, *, is_known: Callable[[Path], bool]) -> tuple[list[Path], list[Path]]:
    """The files below a folder that a caller reads, and the paths that it does not know, both in order of their paths.

    Names that begin with ``.`` or ``_`` are skipped, and folders of such names.

    Args:
        folder: its path.
        is_known: path -> whether its name is one of a file that the caller reads.

    Raises:
        InputError: something below the folder cannot be read or is no file: a folder or a file without permission, a
            link that leads nowhere or to itself, a link to a folder, a named pipe, a socket or a device.
    """
    known: list[Path] = []
    unknown: list[Path] = []
    for path in sorted(_entries(folder)):
        # What no caller would read needs no permission.
        if is_known(path):
            require_readable(path)
            known.append(path)
        else:
            unknown.append(path)
    return known, unknown


def _entries(folder: Path) -> Iterator[Path]:
    """Everything below the folder that is no folder itself."""
    try:
        with os.scandir(folder) as entries:
            names = [entry for entry in entries if not entry.name.startswith(HIDDEN)]
    except OSError as error:
        raise _unreadable(Path(folder), error) from error
    for entry in names:
        path = Path(entry.path)
        try:
            is_folder = entry.is_dir(follow_symlinks=True)
            if entry.is_symlink():
                path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        if is_folder and entry.is_symlink():
            raise InputError(
                f"{path} is a link to a folder, and links to folders are not followed.",
                hint=f"Copy the folder's files here, or name that folder by itself: {os.readlink(path)}",
            )
        if is_folder:
            yield from _entries(path)
        else:
            yield path


def require_readable(path: Path) -> None:
    """Reject a path that is no file, or a file that cannot be opened."""
    try:
        kind = special_kind(path.stat().st_mode)
        if kind is None:
            path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from error
    if kind is not None:
        raise InputError(f"{path} is {kind} and no file.", hint=_MOVE_AWAY)


def special_kind(mode: int) -> str | None:
    """What a file of this mode is, in words, if it is neither a file nor a folder."""
    return next((name for is_one, name in _SPECIAL if is_one(mode)), None)


def require_utf8(path: Path) -> None:
    """Reject a path whose bytes are not UTF-8: libraries in C++ and Rust take text for a path."""
    encoded = os.fsencode(path.absolute())  # text of another locale, as Python reads it
    try:
        encoded.decode()
    except UnicodeDecodeError:
        raise InputError(
            f"{encoded!r} is not UTF-8, and tokenizers and ONNX Runtime open no such path.",
            hint="Give it, and the folders above it, names in UTF-8.",
        ) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return InputError(f"{path} is a link to {os.readlink(path)}, which does not exist.", hint=_MOVE_AWAY)
    return InputError(f"{path} cannot be read: {explained(error, otherwise=_MOVE_AWAY)}")
