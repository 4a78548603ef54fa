"""The files that a batch job reads: found, checked before any work, and how far into them a row is."""

from __future__ import annotations

__all__ = ["InputFile", "RowFormat", "find_inputs", "integer_ids"]

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hdruntime.errors import InputError
from hdruntime.jobs.parquet_rows import checked_rows, has_int64
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
        size_bytes, modified_ns: together they tell a file that changed.
        rows: how many it has; None where only reading it would tell.
    """

    path: Path
    format: RowFormat
    size_bytes: int
    modified_ns: int
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
    shown = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith(_HIDDEN))
    endings = [kind.value for kind in RowFormat]
    for file in shown:
        if file.suffix.lower() not in endings:
            logger.warning("%s is left out: it ends in none of %s", file, ", ".join(endings))
    known = [file for file in shown if file.suffix.lower() in endings]
    if not known:
        raise InputError(f"The directory {path} holds no file that ends in {', '.join(endings)}.")
    return known


def _checked_file(path: Path, columns: Columns) -> InputFile:
    kind = _format_of(path)
    try:
        status = path.stat()
        if path.is_file() and status.st_size == 0:
            raise InputError(f"{path} is empty.\nLeave it out, or check what wrote it.")
        with path.open("rb"):
            pass
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
        rows=checked_rows(path, columns) if kind is RowFormat.PARQUET else None,
    )


def _format_of(file: Path) -> RowFormat:
    try:
        return RowFormat(file.suffix.lower())
    except ValueError:
        endings = ", ".join(kind.value for kind in RowFormat)
        raise InputError(
            f"{file} is of no kind that can be read: its name ends in {file.suffix or 'nothing'!r}.\n"
            f"Inputs end in {endings}."
        ) from None
