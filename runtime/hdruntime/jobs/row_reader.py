"""Rows read one by one from files, starting at any row; invalid rows come with their error."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import math
import unicodedata
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hdruntime.errors import Message, Setting
from hdruntime.jobs.input_files import (
    MAX_LINE_BYTES,
    Cell,
    InputFile,
    Line,
    RowFormat,
    Undecodable,
    cells_of_column,
    column_batches,
    read_lines,
    text_of_line,
)
from hdruntime.jobs.kept_columns import AS_COLUMNS, kept_rows, stays_column
from hdruntime.jobs.rows import ID, Columns, ErrorKind, Position, Row

_BLANKS = " \t\r\n\v\f"
"""Control characters that a valid text may consist of."""

_INVISIBLE = ("Cc", "Cf")
"""Unicode categories of control and format characters."""

_BLOCK_BYTES = 2**20
"""Read at a time for a checksum."""

_SURROGATES = "holds half of a surrogate pair"
"""JSON can write "\\ud800", which is no character: neither a tokenizer nor a UTF-8 file takes it."""

_object_from_json = msgspec.json.Decoder(dict[str, Any]).decode
"""Five times as fast as `json.loads`, whose values it gives; it rejects some texts that `json.loads` reads."""

_bytes_of_cells = msgspec.msgpack.Encoder(enc_hook=repr).encode
"""The bytes of a Parquet row for its checksum; ValueError or OverflowError for a `Cell` that Python cannot show."""

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
    row_of = row_maker(columns)
    for index in range(position.file, len(files)):
        if index > position.file:
            position = Position(file=index, row=position.row)
        row = position.row
        for values, offset, line, checksum in read_values(files[index], columns, position):
            row += 1
            # As `Position(...)`, in half the time.
            position = tuple.__new__(Position, (index, offset, line, row, checksum))
            yield row_of(values, position)


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
    if file.format.is_columnar:
        for read in itertools.islice(_columnar_values(file, columns, Position()), offset):
            checksum = read[-1]
        return checksum
    with file.opened() as stream:
        while offset and (block := stream.read(min(offset, _BLOCK_BYTES))):
            checksum = zlib.crc32(block, checksum)
            offset -= len(block)
    return checksum


def row_maker(columns: Columns) -> Callable[[Values, Position], Row]:
    """The function that makes a row of its values, or of the reason why they could not be read, and of its end.

    The row has its error if the values are invalid.
    """
    # Read once: the function is called for every row.
    name, second, ids, spans = columns.text, columns.text_pair, columns.input_ids, columns.spans
    content, kept_names, keeps_all, id_name = columns.content, columns.keep, columns.keeps_all, columns.id
    wanted = frozenset(columns.wanted)
    check = _check_text if ids is None else _check_ids
    nothing: dict[str, object] = {}

    def row_of(values: Values, end: Position) -> Row:
        if isinstance(values, str):
            kept: dict[str, object] = dict.fromkeys(kept_names or ())
            row_id = None if id_name else end.row - 1
            return Row(id=row_id, kept=kept, error=values, error_kind=ErrorKind.UNREADABLE, end=end)
        row_id = values.get(id_name) if id_name else end.row - 1
        place = values.pop(AS_COLUMNS, None)
        names = kept_names if place is None else place.others
        kept, error = _kept(names, values) if names else (nothing, None)
        if place is not None:
            kept = {AS_COLUMNS: place, **kept}
        dropped = () if not keeps_all or wanted.issuperset(values) else tuple(sorted(values.keys() - wanted))
        if id_name != "" and (bad_id := _check_id(id_name, values)):
            return Row(id=None if id_name else row_id, kept=kept, dropped=dropped, error=bad_id, end=end)
        for each in content:
            error = error or check(each, values)
        if spans is not None and not isinstance(values.get(spans), list):
            error = error or _misfit(spans, values, "a list of [start, end]")
        if error is not None:
            return Row(id=row_id, kept=kept, dropped=dropped, error=error, end=end)
        if ids is not None:
            return Row(id=row_id, input_ids=values[ids], kept=kept, dropped=dropped, end=end)
        pair = None if second is None else values[second]
        parts = None if spans is None else values[spans]
        return Row(id=row_id, text=values[name], text_pair=pair, spans=parts, kept=kept, dropped=dropped, end=end)

    return row_of


def _kept(names: Sequence[str], values: dict[str, Any]) -> tuple[dict[str, object], str | None]:
    """The values of kept columns, and the reason if one is invalid."""
    kept: dict[str, object] = {name: values.get(name) for name in names}
    error = None
    for name, value in kept.items():
        if reason := _reason_against(name, value):
            kept[name], error = None, reason
    return kept, error


def _reason_against(name: str, value: object) -> str | None:
    """Why no output takes a value of a column; None if it does."""
    if value is None or type(value) is int or (type(value) is str and value.isascii()):
        return None  # the fast path, for nearly every value
    nested = value.in_python() if isinstance(value, Cell) else value
    if isinstance(nested, Undecodable):
        return f"Column {name!r} {nested.reason}."
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
    return None if not isinstance(text, str) or is_encodable(text) else f"Column {name!r} {_SURROGATES}."


def _text_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    for content, number, end, checksum in read_lines(file, start):
        text, error = text_of_line(content, number)
        yield error or {columns.text: text.removesuffix("\r")}, end, number, checksum


def _json_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    # pyarrow's reader fails on the whole file at one invalid line or value of another type.
    for content, number, end, checksum in read_lines(file, start):
        try:
            values: Values | None = _object_from_json(content or b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            values = _json_object(content, number)
        if values is not None:
            yield values, end, number, checksum


def _json_object(content: bytes | None, number: int) -> Values | None:
    """The JSON object in a line; the error, as text, if the line holds no object; None if the line is blank."""
    text, error = text_of_line(content, number)
    if error is not None:
        return error
    if not text or text.isspace():
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as problem:
        return f"Line {number} is not valid JSON: {problem}."
    if not isinstance(values, dict):
        return f"Line {number} holds a JSON {type(values).__name__}; an object with columns is required."
    return values


def _csv_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    # pyarrow's reader fails at an unclosed quotation mark and cannot begin in the middle of a file.
    names = [name for name in file.columns if name not in file.partitions]
    is_header = start.offset == 0
    for cells, error, (_, number, end, checksum) in csv_records(file, start):
        if is_header:
            is_header = False
        elif error is not None:
            yield error, end, number, checksum
        elif len(cells) != len(names):
            reason = f"Line {number} ends a record of {len(cells)} cells; the header has {len(names)}."
            yield reason, end, number, checksum
        else:
            yield dict(zip(names, cells, strict=False)), end, number, checksum


def csv_records(file: InputFile, start: Position) -> Iterator[tuple[list[str], str | None, Line]]:
    """The records of a CSV or TSV file, its header too: cells, the reason if there are none, and the last line."""
    # For the whole process: Python has no other way. The default limit, 128 KiB, is too short for documents.
    csv.field_size_limit(MAX_LINE_BYTES)
    record: list[Line] = []
    # A line that cannot be read may hold the mark that is missed.
    broken: list[str] = []

    def texts() -> Generator[str, None, None]:
        for line in read_lines(file, start):
            record.append(line)
            text, error = text_of_line(line[0], line[1])
            if error is not None:
                broken.append(error)
            yield f"{text}\n"

    lines = texts()
    # Unless strict, a quotation mark that is never closed takes in all later records without an error.
    reader = csv.reader(lines, delimiter=_DELIMITERS[file.format], strict=True)
    while True:
        record.clear()
        broken.clear()
        error = None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            is_end = inspect.getgeneratorstate(lines) == inspect.GEN_CLOSED
            cells, error = [], _csv_error(record, problem, file, is_end=is_end)
        if broken:
            error = "\n".join(filter(None, (error, broken[0])))
        if cells or error is not None:
            yield cells, error, record[-1]


def _csv_error(record: Sequence[Line], problem: csv.Error, file: InputFile, *, is_end: bool) -> str:
    """Why lines are no record, and the line of the quotation mark that takes in the last of them."""
    # All lines before the last are within quotes, else the record would have ended there.
    quoted, (_, last, *_) = record if is_end else record[:-1], record[-1]
    reason = f"Line {last} is not valid CSV: {problem}."
    if not quoted:
        return reason
    texts = (f"{text_of_line(content, number)[0]}\n" for content, number, *_ in quoted)
    (cells,) = csv.reader(texts, delimiter=_DELIMITERS[file.format])
    opening = quoted[-1][1] + 1 - cells[-1].count("\n")
    if is_end:
        reason = (
            f"Line {opening} opens a quotation mark that is never closed: it takes in all up to line {last}, the last."
        )
    else:
        reason += f" It is within the quotation mark that line {opening} opens."
    return f"{reason}\nClose the mark where its cell ends; write one inside a cell twice."


def _columnar_values(file: InputFile, columns: Columns, start: Position) -> Iterator[_Read]:
    names = [name for name in columns.wanted if name in file.columns and name not in file.partitions]
    keep = columns.keep or ()
    stay = [name for name in names if name in keep and stays_column(file.types[name])]
    others = [name for name in keep if name not in stay]
    in_rows = [name for name in names if name not in stay or name in (columns.id, *columns.content, columns.spans)]
    number, checksum = start.offset, start.checksum
    for batch in column_batches(file, names, start=number):
        sums, kept = kept_rows(batch, stay, others)
        read = names if kept is None else in_rows
        lists = [cells_of_column(batch.column(name)) for name in read]
        for place, cells in enumerate(zip(*lists, strict=True) if lists else [()] * len(batch)):
            number += 1
            values = dict(zip(read, cells, strict=True))
            try:
                content = _bytes_of_cells(cells if kept is None else (*cells, sums[place]))
                if kept is not None:
                    values[AS_COLUMNS] = kept[place]
                elif stay:
                    # The same checksum, whatever rows are read with this one.
                    content = _bytes_of_cells((*map(values.get, in_rows), sums[place]))
            except (OverflowError, ValueError) as error:
                # Nested values hold text that is not UTF-8, or a day outside of the years 1 to 9999.
                yield f"Row {number} of the file holds a value that cannot be read: {error}.", number, 0, checksum
                continue
            checksum = zlib.crc32(content, checksum)
            yield values, number, 0, checksum


_READERS = {
    RowFormat.JSONL: _json_values,
    RowFormat.CSV: _csv_values,
    RowFormat.TSV: _csv_values,
    RowFormat.PARQUET: _columnar_values,
    RowFormat.ARROW: _columnar_values,
    RowFormat.TEXT: _text_values,
}


def _check_id(name: str | None, values: dict[str, Any]) -> Message | None:
    """The reason why a row has no id, and what to do; `name` is None where rows are numbered for want of ids."""
    row_id = values.get(ID if name is None else name)
    if name is None:
        error = None if row_id is None else f"The row has the column {ID!r}, which none of the first rows has."
    elif row_id is None:
        error = _misfit(name, values, "an id")
    elif isinstance(row_id, float) and not math.isfinite(row_id):
        # JSON has no such value; where numbers have no null, NaN stands for it.
        error = f"Column {name!r} is {row_id}; an id is required."
    else:
        error = _reason_against(name, row_id)
    return error and (f"{error}\nGive every row an id, or number all rows: ", Setting("id_column", ""))


def _check_text(name: str, values: dict[str, Any]) -> str | None:
    text = values.get(name)
    if type(text) is str and text[:1].isalnum() and text.isascii():
        return None  # the fast path, for nearly every text
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
    characters = text.strip(_BLANKS)
    return bool(characters) and all(each in _BLANKS or unicodedata.category(each) in _INVISIBLE for each in characters)
