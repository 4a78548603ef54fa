"""Rows of Parquet files, a few at a time."""

from __future__ import annotations

__all__ = ["Undecodable", "checked_rows", "has_int64", "parquet_values"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns

_BATCH_ROWS = 256
"""Rows decoded at a time; when each is a long document, that is a few tens of megabytes."""


@dataclass(frozen=True)
class Undecodable:
    """Stands for a string that is not UTF-8; Parquet files are not checked when they are written."""

    reason: str


def parquet_values(file: Path, names: Sequence[str], *, start: int = 0) -> Iterator[dict[str, Any]]:
    """The named columns of every row; `Undecodable` in place of a string that is not UTF-8.

    Args:
        file: what is read.
        names: its columns that are wanted.
        start: rows that are left out; of what comes before their row group nothing is read.

    Raises:
        InputError: the file cannot be read on.
    """
    try:
        opened = _opened(file)
        group, left_out = _group_of_row(opened.metadata, start)
        # One thread, unbuffered: only the pages in use are held, however large a row group is.
        batches = opened.iter_batches(
            batch_size=_BATCH_ROWS,
            row_groups=list(range(group, opened.metadata.num_row_groups)),
            columns=names,
            use_threads=False,
        )
        for batch in batches:
            rest = batch.slice(left_out)
            left_out = max(0, left_out - batch.num_rows)
            cells = [[_python_from_scalar(cell) for cell in rest.column(name)] for name in names]
            for row in zip(*cells, strict=True):
                yield dict(zip(names, row, strict=True))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read on: {error}.\nWrite the file again.") from error


def checked_rows(file: Path, columns: Columns) -> int:
    """Number of rows of a file that has some, and the columns with what is wanted in them.

    Raises:
        InputError: it has none, or lacks a column, or a column is of the wrong type; says what the file has.
    """
    try:
        opened = _opened(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} is not a Parquet file that can be read: {error}.") from error
    rows: int = opened.metadata.num_rows
    if rows == 0:
        raise InputError(f"{file} holds no rows.\nLeave it out, or check what wrote it.")
    schema = opened.schema_arrow
    if columns.id is not None:
        _check_column(file, schema, columns.id, "--id-column")
    for name in columns.content:
        option = "--text-pair-column" if name == columns.text_pair else "--text-column"
        _check_column(file, schema, name, option if columns.input_ids is None else "--input-ids-column")
    return rows


def has_int64(file: Path, name: str) -> bool:
    """Whether the column's type says that every value is an integer that fits an int64."""
    kind = _opened(file).schema_arrow.field(name).type
    return bool(pa.types.is_integer(kind) and kind != pa.uint64())


def _group_of_row(metadata: Any, row: int) -> tuple[int, int]:
    """The row group that holds a row, and how many of its rows come before."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < rows:
            return group, row
        row -= rows
    return metadata.num_row_groups, 0


def _check_column(file: Path, schema: Any, name: str, option: str) -> None:
    if schema.names.count(name) != 1:
        raise InputError(
            f"{file} has no column {name!r}, or more than one; its columns are {', '.join(schema.names)}.\n"
            f"Name one of them with {option}."
        )
    kind = schema.field(name).type
    # A column of nothing but nulls has a type of its own; its rows fail one by one.
    if pa.types.is_null(kind):
        return
    wanted = "lists of integers" if option == "--input-ids-column" else "strings"
    fits = _holds_integer_lists(kind) if option == "--input-ids-column" else _holds_strings(kind)
    if not fits and not (option == "--id-column" and pa.types.is_integer(kind)):
        raise InputError(f"Column {name!r} of {file} holds {kind}, not {wanted}.\nName another one with {option}.")


def _holds_strings(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _holds_integer_lists(kind: Any) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests) and bool(pa.types.is_integer(kind.value_type))


def _python_from_scalar(cell: Any) -> object:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return Undecodable(f"byte {error.start + 1} of it, {error.reason}")


def _opened(file: Path) -> Any:
    return pa.parquet.ParquetFile(file, pre_buffer=False)
