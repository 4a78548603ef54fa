"""The files that a batch job reads: found, checked before any work, and how far into them a row is."""

from __future__ import annotations

__all__ = ["InputFile", "RowFormat", "change_of_file", "find_inputs", "integer_ids"]

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from hdruntime.errors import InputError
from hdruntime.jobs.parquet_rows import checked_rows, has_int64
from hdruntime.jobs.regular_files import opened_input
from hdruntime.jobs.rows import Columns

logger = logging.getLogger(__name__)

_HIDDEN = (".", "_")
"""First letters of names that a directory's listing leaves out, such as Spark's _SUCCESS."""


class RowFormat(str, Enum):
    """How a file holds rows; told by the ending of its name, which is the value."""

    JSONL = ".jsonl"
    PARQUET = ".parquet"
    TEXT = ".txt"


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of rows, as it was found.

    Attributes:
        path: as it was given, or below a directory that was given.
        format: how it holds rows.
        size_bytes, modified_ns: where either differs, the file was written to, or another has taken its place.
        inode, changed_ns: where only these differ, it may also have been copied, or its owner changed.
        rows: how many it has; None where only reading it would tell.
    """

    path: Path
    format: RowFormat
    size_bytes: int
    modified_ns: int
    inode: int
    changed_ns: int
    rows: int | None

    def bytes_before(self, offset: int) -> int:
        """Bytes of the file that come before an offset, which counts rows where `rows` is known."""
        return offset if self.rows is None else round(self.size_bytes * offset / self.rows)


def find_inputs(paths: Sequence[Path], *, columns: Columns) -> list[InputFile]:
    """The files to read, directories replaced by the files in them, in the order given and then of names.

    What can be known without reading the rows is checked here, before any work: that the files are there, can
    be opened, are not empty, and, for Parquet, have the columns.

    Raises:
        InputError: a file does not fit, or there is none.
    """
    found = [file for path in paths for file in _files_at(Path(path))]
    if not found:
        raise InputError("No input was given. Name at least one file or directory.")
    return [_checked_file(file, columns) for file in found]


def change_of_file(before: tuple[int, int], now: tuple[int, int]) -> str | None:
    """What a file's size in bytes and time of the last change in nanoseconds, before and now, say of it in words."""
    if now[0] != before[0]:
        return f"its size was {before[0]} bytes, and is {now[0]}"
    if now[1] != before[1]:
        return f"it was written to at {_clock_time(now[1])}, though its size is the same"
    return None


def integer_ids(files: Sequence[InputFile], *, columns: Columns) -> bool:
    """Whether every id is known to fit an int64: rows are numbered, or Parquet columns say so."""
    if columns.id is None:
        return True
    if any(file.format is not RowFormat.PARQUET for file in files):
        return False
    return all(has_int64(file.path, columns.id) for file in files)


def _files_at(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"There is no file or directory {path}.")
    if not path.is_dir():
        return [path]
    shown = sorted(file for file in path.iterdir() if not (file.is_dir() or file.name.startswith(_HIDDEN)))
    endings = [kind.value for kind in RowFormat]
    known = []
    for file in shown:
        if file.suffix.lower() not in endings:
            logger.warning("%s is left out: it ends in none of %s", file, ", ".join(endings))
        elif not file.is_file():
            logger.warning("%s is left out: it is no file", file)
        else:
            known.append(file)
    if not known:
        raise InputError(f"The directory {path} holds no file that ends in {', '.join(endings)}.")
    return known


def _checked_file(path: Path, columns: Columns) -> InputFile:
    kind = _format_of(path)
    try:
        with opened_input(path) as opened:
            status = os.fstat(opened.fileno())
        if status.st_size == 0:
            raise InputError(f"{path} is empty.\nLeave it out, or check what wrote it.")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    named = columns.text_pair or columns.id or columns.input_ids
    if kind is RowFormat.TEXT and named is not None:
        raise InputError(
            f"{path} is plain text, so it has no column {named!r}.\nUse .jsonl or .parquet for rows with columns."
        )
    return InputFile(
        path=path,
        format=kind,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        inode=status.st_ino,
        changed_ns=status.st_ctime_ns,
        rows=checked_rows(path, columns) if kind is RowFormat.PARQUET else None,
    )


def _clock_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).isoformat(sep=" ", timespec="milliseconds")


def _format_of(file: Path) -> RowFormat:
    try:
        return RowFormat(file.suffix.lower())
    except ValueError:
        endings = ", ".join(kind.value for kind in RowFormat)
        raise InputError(
            f"{file} is of no kind that can be read: its name ends in {file.suffix or 'nothing'!r}.\n"
            f"Inputs end in {endings}."
        ) from None
