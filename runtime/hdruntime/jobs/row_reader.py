"""Rows read one by one from files, starting at any row; invalid rows come with their error."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import math
import unicodedata
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from hdruntime.jobs.input_files import (
    MAX_LINE_BYTES,
    Cell,
    InputFile,
    Line,
    RowFormat,
    Undecodable,
    parquet_values,
    read_lines,
)
from hdruntime.jobs.rows import ID, Columns, ErrorKind, Position, Row

_BLANKS = " \t\r\n\v\f"
"""Control characters that a valid text may consist of."""

_INVISIBLE = ("Cc", "Cf")
"""Unicode categories of control and format characters."""

_BLOCK_BYTES = 2**20
"""Read at a time for a checksum."""

_SURROGATES = "holds half of a surrogate pair"
"""JSON can write "\\ud800", which is no character: neither a tokenizer nor a UTF-8 file takes it."""

_DELIMITERS = {RowFormat.CSV: ",", RowFormat.TSV: "\t"}

Values = dict[str, Any] | str
"""A row's columns, or the reason why they could not be read."""

_Read = tuple[Values, int, int, int]
"""A row's values, and the offset, line and checksum of its end; see `Position`."""


def read_rows(files: Sequence[InputFile], *, columns: Columns, start: Position | None = None) -> Iterator[Row]:
    """Every row of the files after a position, in order. A row that cannot be read comes with its `error`.

    Blank lines of JSON Lines and CSV files are skipped; a blank line of a text file is an empty text. InputError if a
    file cannot be read to its end.
    """
    position = start or Position()
    for index in range(position.file, len(files)):
        if index > position.file:
            position = Position(file=index, row=position.row)
        for values, offset, line, checksum in read_values(files[index], columns, position):
            position = Position(index, offset, line, position.row + 1, checksum)
            yield row_from_values(values, columns, end=position)


def read_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    """The values of a file's rows after a position, and where each row ends. JSON Lines give all columns."""
    rows = _READERS[file.format](file, columns, start)
    if not file.partitions:
        return rows
    return (_with_partitions(read, file.partitions) for read in rows)


def _with_partitions(read: _Read, partitions: Mapping[str, object]) -> _Read:
    values, offset, line, checksum = read
    return values if isinstance(values, str) else {**values, **partitions}, offset, line, checksum


def checksum_before(file: InputFile, columns: Columns, offset: int) -> int:
    """The value of `Position.checksum` at an offset of the file as it is now."""
    checksum = 0
    if file.format is RowFormat.PARQUET:
        for read in itertools.islice(_parquet_values(file, columns, Position()), offset):
            checksum = read[-1]
        return checksum
    with file.opened() as stream:
        while offset and (block := stream.read(min(offset, _BLOCK_BYTES))):
            checksum = zlib.crc32(block, checksum)
            offset -= len(block)
    return checksum


def row_from_values(values: Values, columns: Columns, *, end: Position) -> Row:
    """The row of values, or of the reason why they could not be read; with its error if they are invalid."""
    row_id = end.row - 1 if not columns.id else None if isinstance(values, str) else values.get(columns.id)
    if isinstance(values, str):
        kept: dict[str, object] = dict.fromkeys(columns.keep or ())
        return Row(id=row_id, kept=kept, error=values, error_kind=ErrorKind.UNREADABLE, end=end)
    kept, error = _kept(columns.keep, values) if columns.keep else ({}, None)
    dropped = tuple(sorted(set(values).difference(columns.wanted))) if columns.keeps_all else ()
    if bad_id := _check_id(columns.id, values):
        return Row(id=None if columns.id else row_id, kept=kept, dropped=dropped, error=bad_id, end=end)
    check = _check_text if columns.input_ids is None else _check_ids
    for name in columns.content:
        error = error or check(name, values)
    if columns.spans is not None and not isinstance(values.get(columns.spans), list):
        error = error or _misfit(columns.spans, values, "a list of [start, end]")
    if error is not None:
        return Row(id=row_id, kept=kept, dropped=dropped, error=error, end=end)
    if columns.input_ids is not None:
        return Row(id=row_id, input_ids=values[columns.input_ids], kept=kept, dropped=dropped, end=end)
    pair = None if columns.text_pair is None else values[columns.text_pair]
    spans = None if columns.spans is None else values[columns.spans]
    return Row(id=row_id, text=values[columns.text], text_pair=pair, spans=spans, kept=kept, dropped=dropped, end=end)


def _kept(names: Sequence[str], values: dict[str, Any]) -> tuple[dict[str, object], str | None]:
    """The values of kept columns, and the reason if one is invalid."""
    kept: dict[str, object] = {}
    error = None
    for name in names:
        value = values.get(name)
        if isinstance(value, Undecodable):
            value, error = None, _misfit(name, values, "UTF-8")
        elif isinstance(value, str | list | dict) and not is_encodable(json.dumps(value, ensure_ascii=False)):
            value, error = None, f"Column {name!r} {_SURROGATES}."
        elif isinstance(value, Cell) and isinstance(nested := value.in_python(), Undecodable):
            value, error = None, f"Column {name!r} {nested.reason}."
        kept[name] = value
    return kept, error


def _text_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    for line in read_lines(file, start):
        yield line.error or {columns.text: line.text.removesuffix("\r")}, line.end, line.number, line.checksum


def _json_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    # pyarrow's reader fails on the whole file at one invalid line or value of another type.
    for line in read_lines(file, start):
        if line.error is not None:
            yield line.error, line.end, line.number, line.checksum
        elif line.text and not line.text.isspace():
            yield _json_object(line.number, line.text), line.end, line.number, line.checksum


def _json_object(number: int, text: str) -> Values:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"Line {number} is not valid JSON: {error}."
    if not isinstance(values, dict):
        return f"Line {number} holds a JSON {type(values).__name__}; an object with columns is required."
    return values


def _csv_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    # pyarrow's reader fails at an unclosed quotation mark and cannot begin in the middle of a file.
    names = [name for name in file.columns if name not in file.partitions]
    is_header = start.offset == 0
    for cells, error, line in csv_records(file, start):
        if is_header:
            is_header = False
        elif error is not None:
            yield error, line.end, line.number, line.checksum
        elif len(cells) != len(names):
            reason = f"Line {line.number} ends a record of {len(cells)} cells; the header has {len(names)}."
            yield reason, line.end, line.number, line.checksum
        else:
            yield dict(zip(names, cells, strict=True)), line.end, line.number, line.checksum


def csv_records(file: InputFile, start: Position) -> Iterator[tuple[list[str], str | None, Line]]:
    """The records of a CSV or TSV file, its header too: cells, the reason if there are none, and the last line."""
    # For the whole process: Python has no other way. The default limit, 128 KiB, is too short for documents.
    csv.field_size_limit(MAX_LINE_BYTES)
    record: list[Line] = []

    def lines() -> Generator[str, None, None]:
        for line in read_lines(file, start):
            record.append(line)
            yield f"{line.text}\n"

    texts = lines()
    # Unless strict, a quotation mark that is never closed takes in all later records without an error.
    reader = csv.reader(texts, delimiter=_DELIMITERS[file.format], strict=True)
    while True:
        record.clear()
        try:
            cells, error = next(reader), None
        except StopIteration:
            return
        except csv.Error as problem:
            is_end = inspect.getgeneratorstate(texts) == inspect.GEN_CLOSED
            cells, error = [], _csv_error(record, problem, file, is_end=is_end)
        # A line that cannot be read may hold the mark that is missed.
        broken = next((line.error for line in record if line.error is not None), None)
        error = "\n".join(filter(None, (error, broken))) or None
        if cells or error is not None:
            yield cells, error, record[-1]


def _csv_error(record: Sequence[Line], problem: csv.Error, file: InputFile, *, is_end: bool) -> str:
    """Why lines are no record, and the line of the quotation mark that takes in the last of them."""
    # All lines before the last are within quotation marks, else the record would have ended there.
    quoted, last = record if is_end else record[:-1], record[-1].number
    reason = f"Line {last} is not valid CSV: {problem}."
    if not quoted:
        return reason
    (cells,) = csv.reader((f"{line.text}\n" for line in quoted), delimiter=_DELIMITERS[file.format])
    opening = quoted[-1].number + 1 - cells[-1].count("\n")
    if is_end:
        reason = (
            f"Line {opening} opens a quotation mark that is never closed: it takes in all up to line {last}, the last."
        )
    else:
        reason += f" It is within the quotation mark that line {opening} opens."
    return f"{reason}\nClose the mark where its cell ends; write one inside a cell twice."


def _parquet_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    names = [name for name in columns.wanted if name in file.columns and name not in file.partitions]
    checksum = start.checksum
    for number, values in enumerate(parquet_values(file, names, start=start.offset), start.offset + 1):
        try:
            content = repr(values)
        except (OverflowError, ValueError) as error:
            # Nested values hold text that is not UTF-8, or a day outside of the years 1 to 9999.
            yield f"Row {number} of the file holds a value that cannot be read: {error}.", number, 0, checksum
            continue
        checksum = zlib.crc32(content.encode(), checksum)
        yield values, number, 0, checksum


_READERS = {
    RowFormat.JSONL: _json_values,
    RowFormat.CSV: _csv_values,
    RowFormat.TSV: _csv_values,
    RowFormat.PARQUET: _parquet_values,
    RowFormat.TEXT: _text_values,
}


def _check_id(name: str | None, values: dict[str, Any]) -> str | None:
    """The reason why a row has no id, and the remedy; `name` is None where rows are numbered for want of ids."""
    row_id = values.get(ID if name is None else name)
    if name is None:
        error = None if row_id is None else f"The row has the column {ID!r}, which none of the first rows has."
    elif not name:
        return None
    elif row_id is None:
        error = _misfit(name, values, "an id")
    elif isinstance(row_id, float) and not math.isfinite(row_id):
        # JSON has no such value; where numbers have no null, NaN stands for it.
        error = f"Column {name!r} is {row_id}; an id is required."
    else:
        _, error = _kept((name,), values)
    return error and f"{error}\nGive every row an id, or number all rows: --id-column ''"


def _check_text(name: str, values: dict[str, Any]) -> str | None:
    text = values.get(name)
    if not isinstance(text, str):
        return _misfit(name, values, "a string")
    if not is_encodable(text):
        return f"The text in column {name!r} {_SURROGATES}."
    if _is_invisible(text):
        return f"The text in column {name!r} holds only control characters."
    return None


def _check_ids(name: str, values: dict[str, Any]) -> str | None:
    ids = values.get(name)
    if not isinstance(ids, list):
        return _misfit(name, values, "a list of integers")
    for index, number in enumerate(ids):
        # `type() is`, not isinstance: True is an int in Python.
        if type(number) is not int:
            return f"Column {name!r} holds {type(number).__name__} at index {index}; a list of integers is required."
    return None


def _misfit(name: str, values: dict[str, Any], wanted: str) -> str:
    if name not in values:
        return f"The row has no column {name!r}; it has {', '.join(map(repr, values)) or 'none'}."
    if isinstance(values[name], Undecodable):
        return f"Column {name!r} {values[name].reason}."
    if values[name] is None:
        return f"Column {name!r} is null; {wanted} is required."
    return f"Column {name!r} holds {type(values[name]).__name__}; {wanted} is required."


def is_encodable(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_invisible(text: str) -> bool:
    """Whether a text that is not blank has only control and format characters."""
    if text[:1].isalnum():
        return False  # the fast path, for nearly every text
    marks = text.strip(_BLANKS)
    return bool(marks) and all(mark in _BLANKS or unicodedata.category(mark) in _INVISIBLE for mark in marks)
