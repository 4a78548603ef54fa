"""Rows of a batch job, read one by one from JSON Lines, Parquet and plain text."""

from __future__ import annotations

__all__ = ["Columns", "Row", "RowFormat", "find_inputs", "integer_ids", "read_rows"]

import codecs
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hdruntime.errors import InputError
from hdruntime.parquet_rows import Undecodable, check_parquet, has_int64, parquet_values

logger = logging.getLogger(__name__)

_HIDDEN = (".", "_")
"""First letters of names that a directory's listing leaves out, such as Spark's _SUCCESS."""


class RowFormat(str, Enum):
    """How a file holds rows; told by the ending of its name, which is the value."""

    JSONL = ".jsonl"
    PARQUET = ".parquet"
    TEXT = ".txt"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where a row's parts are. A line of plain text has no columns: it is the text.

    Attributes:
        text: column of the text.
        text_pair: column of the second text, for tasks on pairs.
        id: column of the row's id, a string or an integer; by default rows are numbered from 0.
    """

    text: str = "text"
    text_pair: str | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as it was read; `error` says why it has no text, else None."""

    id: str | int | None
    text: str = ""
    text_pair: str | None = None
    error: str | None = None


def find_inputs(paths: Sequence[Path], *, columns: Columns) -> list[Path]:
    """The files to read, directories replaced by the files in them, in the order given and then of names.

    What can be known without reading the rows is checked here, before any work: that the files are there, can
    be opened, are not empty, and, for Parquet, have the columns.

    Raises:
        InputError: a file does not fit, or there is none.
    """
    files = [file for path in paths for file in _files_at(Path(path))]
    if not files:
        raise InputError("No input was given. Name at least one file or directory.")
    for file in files:
        _check_file(file, columns)
    return files


def read_rows(files: Sequence[Path], *, columns: Columns) -> Iterator[Row]:
    """Every row of the files, in order. A row that cannot be read comes with its `error`; reading goes on.

    Blank lines of a JSON Lines file are no rows; a blank line of a text file is an empty text.

    Raises:
        InputError: a file cannot be read on, or held no row.
    """
    number = 0
    for file in files:
        before = number
        for values in _READERS[_format_of(file)](file, columns):
            yield _row_from_values(values, number, columns)
            number += 1
        if number == before:
            raise InputError(f"{file} holds no rows.\nLeave it out, or check what wrote it.")


def integer_ids(files: Sequence[Path], *, columns: Columns) -> bool:
    """Whether every id is known to fit an int64: rows are numbered, or Parquet columns say so."""
    if columns.id is None:
        return True
    if any(_format_of(file) is not RowFormat.PARQUET for file in files):
        return False
    return all(has_int64(file, columns.id) for file in files)


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


def _format_of(file: Path) -> RowFormat:
    try:
        return RowFormat(file.suffix.lower())
    except ValueError:
        endings = ", ".join(kind.value for kind in RowFormat)
        raise InputError(
            f"{file} is of no kind that can be read: its name ends in {file.suffix or 'nothing'!r}.\n"
            f"Inputs end in {endings}."
        ) from None


def _check_file(file: Path, columns: Columns) -> None:
    kind = _format_of(file)
    try:
        if file.is_file() and file.stat().st_size == 0:
            raise InputError(f"{file} is empty.\nLeave it out, or check what wrote it.")
        with file.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    if kind is RowFormat.PARQUET:
        check_parquet(file, text=columns.text, text_pair=columns.text_pair, id=columns.id)
    named = columns.text_pair or columns.id
    if kind is RowFormat.TEXT and named is not None:
        raise InputError(
            f"{file} is plain text, so it has no column {named!r}.\nUse .jsonl or .parquet for rows with columns."
        )


def _row_from_values(values: dict[str, Any] | str, number: int, columns: Columns) -> Row:
    """The row that a reader's values make; a reader gives a string where it could not read a row."""
    if isinstance(values, str):
        return Row(id=None if columns.id else number, error=values)
    row_id: str | int | None = number
    if columns.id is not None:
        row_id = values.get(columns.id)
        if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
            return Row(id=None, error=_misfit(columns.id, values, "a string or an integer"))
        if isinstance(row_id, str) and not _encodable(row_id):
            return Row(id=None, error=f"The id in column {columns.id!r} holds half of a surrogate pair.")
    wanted = [columns.text] if columns.text_pair is None else [columns.text, columns.text_pair]
    for name in wanted:
        text = values.get(name)
        if not isinstance(text, str):
            return Row(id=row_id, error=_misfit(name, values, "a string"))
        # JSON can write "\ud800", which is no character: neither a tokenizer nor a UTF-8 file takes it.
        if not _encodable(text):
            return Row(id=row_id, error=f"The text in column {name!r} holds half of a surrogate pair.")
    pair = None if columns.text_pair is None else values[columns.text_pair]
    return Row(id=row_id, text=values[columns.text], text_pair=pair)


def _misfit(name: str, values: dict[str, Any], wanted: str) -> str:
    if name not in values:
        return f"The row has no column {name!r}; it has {', '.join(map(repr, values)) or 'none'}."
    if isinstance(values[name], Undecodable):
        return f"Column {name!r} is not valid UTF-8: {values[name].reason}."
    if values[name] is None:
        return f"Column {name!r} is null; {wanted} is needed."
    return f"Column {name!r} holds {type(values[name]).__name__} where {wanted} is needed."


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_values(file: Path, columns: Columns) -> Iterator[dict[str, Any] | str]:
    for number, line in _lines(file):
        yield {columns.text: line} if isinstance(line, str) else _not_utf8(number, line)


def _json_values(file: Path, columns: Columns) -> Iterator[dict[str, Any] | str]:
    del columns
    for number, line in _lines(file):
        if not isinstance(line, str):
            yield _not_utf8(number, line)
        elif line.strip():
            yield _json_object(number, line)


def _json_object(number: int, line: str) -> dict[str, Any] | str:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"Line {number} is not valid JSON: {error}."
    if not isinstance(values, dict):
        return f"Line {number} holds a JSON {type(values).__name__}; an object with columns is needed."
    return values


def _lines(file: Path) -> Iterator[tuple[int, str | UnicodeDecodeError]]:
    """Line numbers from 1 and lines without their ends; the error in place of a line that is not UTF-8."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                try:
                    yield number, content.removesuffix(b"\n").removesuffix(b"\r").decode()
                except UnicodeDecodeError as error:
                    yield number, error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error


def _not_utf8(number: int, error: UnicodeDecodeError) -> str:
    return f"Line {number} is not valid UTF-8: byte {error.start + 1} of it, {error.reason}."


def _parquet_rows(file: Path, columns: Columns) -> Iterator[dict[str, Any] | str]:
    return parquet_values(file, [name for name in (columns.id, columns.text, columns.text_pair) if name])


_READERS = {
    RowFormat.JSONL: _json_values,
    RowFormat.PARQUET: _parquet_rows,
    RowFormat.TEXT: _text_values,
}
