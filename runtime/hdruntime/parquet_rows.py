"""Rows of Parquet files, a few at a time."""

from __future__ import annotations

__all__ = ["Undecodable", "check_parquet", "has_int64", "parquet_values"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from hdruntime.errors import InputError

_BATCH_ROWS = 256
"""Rows decoded at a time; when each is a long document, that is a few tens of megabytes."""


@dataclass(frozen=True)
class Undecodable:
    """Stands for a string that is not UTF-8; Parquet files are not checked when they are written."""

    reason: str


def parquet_values(file: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The named columns of every row; `Undecodable` in place of a string that is not UTF-8.

    Raises:
        InputError: the file cannot be read on.
    """
    try:
        # One thread, unbuffered: only the pages in use are held, however large a row group is.
        batches = _opened(file).iter_batches(batch_size=_BATCH_ROWS, columns=names, use_threads=False)
        for batch in batches:
            cells = [[_python_from_scalar(cell) for cell in batch.column(name)] for name in names]
            for row in zip(*cells, strict=True):
                yield dict(zip(names, row, strict=True))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read on: {error}.\nWrite the file again.") from error


def check_parquet(file: Path, *, text: str, text_pair: str | None, id: str | None) -> None:  # noqa: A002
    """Refuse a file that has no rows, or lacks a column, or holds no strings there (for ids: or integers).

    Raises:
        InputError: saying which, and what the file has.
    """
    try:
        opened = _opened(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} is not a Parquet file that can be read: {error}.") from error
    if opened.metadata.num_rows == 0:
        raise InputError(f"{file} holds no rows.\nLeave it out, or check what wrote it.")
    options = {"--text-column": text, "--text-pair-column": text_pair, "--id-column": id}
    for option, name in options.items():
        if name is not None:
            _check_column(file, opened.schema_arrow, name, option)


def has_int64(file: Path, name: str) -> bool:
    """Whether the column's type says that every value is an integer that fits an int64."""
    kind = _opened(file).schema_arrow.field(name).type
    return bool(pa.types.is_integer(kind) and kind != pa.uint64())


def _check_column(file: Path, schema: Any, name: str, option: str) -> None:
    if schema.names.count(name) != 1:
        raise InputError(
            f"{file} has no column {name!r}, or more than one; its columns are {', '.join(schema.names)}.\n"
            f"Name one of them with {option}."
        )
    kind = schema.field(name).type
    if not _holds_strings(kind) and not (option == "--id-column" and pa.types.is_integer(kind)):
        raise InputError(f"Column {name!r} of {file} holds {kind}, not strings.\nName another one with {option}.")


def _holds_strings(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    # A column of nothing but nulls has a type of its own; its rows fail one by one.
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)


def _python_from_scalar(cell: Any) -> object:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return Undecodable(f"byte {error.start + 1} of it, {error.reason}")


def _opened(file: Path) -> Any:
    return pa.parquet.ParquetFile(file, pre_buffer=False)
