"""Rows read one by one from JSON Lines, Parquet and plain text, from any row on; bad ones come with their error."""

from __future__ import annotations

__all__ = ["checksum_before", "read_rows", "row_from_values"]

import itertools
import json
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from hdruntime.errors import InputError
from hdruntime.jobs.input_files import InputFile, RowFormat
from hdruntime.jobs.lines import read_lines
from hdruntime.jobs.parquet_rows import Undecodable, parquet_values
from hdruntime.jobs.regular_files import opened_input
from hdruntime.jobs.rows import Columns, ErrorKind, Position, Row

_BLANKS = " \t\r\n\v\f"
"""Control characters that a text may well consist of."""

_INVISIBLE = ("Cc", "Cf")
"""Unicode's categories of control and format characters."""

_BLOCK_BYTES = 2**20
"""Read at a time where nothing but a checksum is wanted."""

Values = dict[str, Any] | str
"""A row's columns; a string, which says why, where they could not be read."""

_Read = tuple[Values, int, int, int]
"""Of a row; the offset, the line and the checksum of where it ends, as `Position` has them."""


def read_rows(files: Sequence[InputFile], *, columns: Columns, start: Position | None = None) -> Iterator[Row]:
    """Every row of the files, in order. A row that cannot be read comes with its `error`; reading goes on.

    Blank lines of a JSON Lines file are no rows; a blank line of a text file is an empty text.

    Args:
        files: what `find_inputs` found.
        columns: which of their columns are read.
        start: `end` of the row before; what comes before that is not read again. None: the beginning.

    Raises:
        InputError: a file cannot be read on, or held no row.
    """
    position = start or Position()
    for index in range(position.file, len(files)):
        if index > position.file:
            position = Position(file=index, row=position.row)
        before = position
        for values, offset, line, checksum in _READERS[files[index].format](files[index], columns, position):
            position = Position(index, offset, line, position.row + 1, checksum)
            yield row_from_values(values, columns, end=position)
        # Before a position that is not the file's beginning there was a row.
        if position == before and position.offset == 0:
            raise InputError(f"{files[index].path} holds no rows.\nLeave it out, or check what wrote it.")


def checksum_before(file: InputFile, columns: Columns, offset: int) -> int:
    """What `Position.checksum` would be at an offset of the file as it is now.

    Raises:
        InputError: the file cannot be read so far.
    """
    checksum = 0
    if file.format is RowFormat.PARQUET:
        for read in itertools.islice(_parquet_values(file, columns, Position()), offset):
            checksum = read[-1]
        return checksum
    try:
        with opened_input(file.path) as stream:
            while offset and (block := stream.read(min(offset, _BLOCK_BYTES))):
                checksum = zlib.crc32(block, checksum)
                offset -= len(block)
    except OSError as error:
        raise InputError(f"{file.path} cannot be read: {error.strerror}.") from error
    return checksum


def row_from_values(values: Values, columns: Columns, *, end: Position) -> Row:
    """The row that a reader's values make, or its error.

    Args:
        values: the row's columns; a string, which says why, where they could not be read.
        columns: which of them are wanted.
        end: of the row.
    """
    if isinstance(values, str):
        row_id = None if columns.id else end.row - 1
        return Row(id=row_id, error=values, error_kind=ErrorKind.UNREADABLE, end=end)
    row_id = end.row - 1 if columns.id is None else values.get(columns.id)
    if columns.id is not None and (error := _check_id(columns.id, values)):
        return Row(id=None, error=error, end=end)
    check = _check_text if columns.input_ids is None else _check_ids
    for name in columns.content:
        if error := check(name, values):
            return Row(id=row_id, error=error, end=end)
    if columns.input_ids is not None:
        return Row(id=row_id, input_ids=values[columns.input_ids], end=end)
    pair = None if columns.text_pair is None else values[columns.text_pair]
    return Row(id=row_id, text=values[columns.text], text_pair=pair, end=end)


def _text_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    for line in read_lines(file.path, offset=start.offset, number=start.line, checksum=start.checksum):
        yield (line.error or {columns.text: line.text}), line.end, line.number, line.checksum


def _json_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    del columns
    for line in read_lines(file.path, offset=start.offset, number=start.line, checksum=start.checksum):
        if line.text is None:
            yield line.error or "", line.end, line.number, line.checksum
        elif line.text.strip():
            yield _json_object(line.number, line.text), line.end, line.number, line.checksum


def _json_object(number: int, text: str) -> Values:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"Line {number} is not valid JSON: {error}."
    if not isinstance(values, dict):
        return f"Line {number} holds a JSON {type(values).__name__}; an object with columns is needed."
    return values


def _parquet_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    names = [name for name in (columns.id, *columns.content) if name]
    checksum = start.checksum
    for number, values in enumerate(parquet_values(file.path, names, start=start.offset), start.offset + 1):
        checksum = zlib.crc32(repr(values).encode(), checksum)
        yield values, number, 0, checksum


_READERS = {
    RowFormat.JSONL: _json_values,
    RowFormat.PARQUET: _parquet_values,
    RowFormat.TEXT: _text_values,
}


def _check_id(name: str, values: dict[str, Any]) -> str | None:
    row_id = values.get(name)
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
        return _misfit(name, values, "a string or an integer")
    if isinstance(row_id, str) and not _encodable(row_id):
        return f"The id in column {name!r} holds half of a surrogate pair."
    return None


def _check_text(name: str, values: dict[str, Any]) -> str | None:
    text = values.get(name)
    if not isinstance(text, str):
        return _misfit(name, values, "a string")
    # JSON can write "\ud800", which is no character: neither a tokenizer nor a UTF-8 file takes it.
    if not _encodable(text):
        return f"The text in column {name!r} holds half of a surrogate pair."
    if _is_invisible(text):
        return f"The text in column {name!r} holds nothing but control characters."
    return None


def _check_ids(name: str, values: dict[str, Any]) -> str | None:
    ids = values.get(name)
    if not isinstance(ids, list):
        return _misfit(name, values, "a list of integers")
    for index, number in enumerate(ids):
        # `type() is`, not isinstance: True is an int in Python.
        if type(number) is not int:
            return f"Column {name!r} holds {type(number).__name__} at index {index}; a list of integers is needed."
    return None


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


def _is_invisible(text: str) -> bool:
    """Whether a text that is not blank has no character that stands for anything."""
    if text[:1].isalnum():
        return False  # at once, as for nearly every text
    marks = text.strip(_BLANKS)
    return bool(marks) and all(mark in _BLANKS or unicodedata.category(mark) in _INVISIBLE for mark in marks)
