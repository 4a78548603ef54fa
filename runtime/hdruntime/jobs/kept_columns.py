"""Kept columns of Parquet files that stay columns from the input to the output; a row has only its place in them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hdruntime.jobs.input_files import Cell, Undecodable

AS_COLUMNS: Any = None
"""Stands for the kept columns that stay columns among names, which are texts."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""To multiply by it mixes the bits of a number: 2^64 divided by the golden ratio."""

_OF_BYTES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_OF_ONE_SIZE = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_date)


class KeptRow(NamedTuple):
    """A row's place in the kept columns that stay columns.

    Attributes:
        columns: columns of this row and of others that were read with it.
        number: number of the row among these rows.
        size_bytes: about the size of the row's values.
        others: kept columns that are values of the row.
    """

    columns: pa.RecordBatch
    number: int
    size_bytes: int
    others: Sequence[str]


def stays_column(kind: pa.DataType, *, is_nested: bool = False) -> bool:
    """Whether `kept_rows` knows columns of the type."""
    if pa.types.is_dictionary(kind) and not is_nested:
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return all(stays_column(field.type, is_nested=True) for field in kind)
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        # In a struct, Python shows only some times in nanoseconds.
        return not (is_nested and kind.unit == "ns")
    return any(is_one(kind) for is_one in (*_OF_BYTES, *_OF_ONE_SIZE))


def kept_rows(
    batch: pa.RecordBatch, names: Sequence[str], others: Sequence[str]
) -> tuple[list[int], list[KeptRow] | None]:
    """A number of each row's values in the named columns, for a checksum, and its place in them.

    None without names, and if a value may be one that no output takes: then these columns are values of rows, too.
    """
    if not names:
        return [], None
    kept = batch.select(names)
    decoded = pa.RecordBatch.from_arrays([_decoded(column) for column in kept], names=names)
    leaves = list(_leaves(decoded.to_struct_array()))
    sums, sizes = _sums_and_sizes(leaves)
    if not _are_shown(decoded, leaves):
        return sums, None
    # As `KeptRow(...)`, in half the time.
    return sums, [tuple.__new__(KeptRow, (kept, number, size, others)) for number, size in enumerate(sizes)]


def _decoded(column: pa.Array) -> pa.Array:
    """The column without a dictionary. While rows are held it has one, as its values may be long and repeat."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """The columns that structs consist of, and which of the structs are there."""
    if not pa.types.is_struct(column.type):
        yield column
        return
    yield column.is_valid()
    for child in column.flatten():
        yield from _leaves(child)


def _sums_and_sizes(leaves: Sequence[pa.Array]) -> tuple[list[int], list[int]]:
    sums, sizes = np.zeros((2, len(leaves[0])), np.uint64)
    for leaf in leaves:
        if any(is_one(leaf.type) for is_one in _OF_BYTES):
            texts = leaf.cast(pa.large_binary()).fill_null(b"").to_pylist()
            values = np.fromiter(map(zlib.crc32, texts), np.uint64, len(texts))
            sizes += np.fromiter(map(len, texts), np.uint64, len(texts))
        else:
            leaf = leaf.cast(pa.uint8()) if pa.types.is_boolean(leaf.type) else leaf
            width = leaf.type.bit_width // 8
            values = np.frombuffer(leaf.buffers()[1], f"u{width}", len(leaf), leaf.offset * width).astype(np.uint64)
        is_there = leaf.is_valid().to_numpy(zero_copy_only=False)
        sums = (sums + np.where(is_there, values, ~_FACTOR)) * _FACTOR
        sums ^= sums >> np.uint64(32)
    return sums.tolist(), sizes.tolist()


def _are_shown(columns: pa.RecordBatch, leaves: Sequence[pa.Array]) -> bool:
    """Whether Python surely shows every value: texts are UTF-8, and times within its years."""
    from pyarrow import compute  # which takes long to load, and which other jobs go without

    try:
        columns.validate(full=True)
        times = [compute.min_max(leaf).values() for leaf in leaves if pa.types.is_temporal(leaf.type)]
        first = [column.drop_null()[:1] for column in columns]
        cells = [Cell(scalar) for scalar in itertools.chain(*times, *first) if scalar.is_valid]
        return all(repr(cell) and not isinstance(cell.in_python(), Undecodable) for cell in cells)
    except (OverflowError, ValueError):
        return False


def columns_in_parts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[list[Any]]:
    """The parts of each column: lists of values, and columns that were read as such."""
    runs: list[tuple[slice, pa.RecordBatch | None]] = []
    places: list[Any] = [row.get(AS_COLUMNS) for row in rows]
    for _, group in itertools.groupby(places, key=lambda place: place and id(place.columns)):
        run, start = list(group), runs[-1][0].stop if runs else 0
        runs.append((slice(start, start + len(run)), run[0] and _rows_of(run)))
    kept = {name for _, columns in runs if columns is not None for name in columns.schema.names}
    for name in names:
        yield [
            _decoded(columns.column(name))
            if columns and name in columns.schema.names
            else [row[name] for row in rows[where]]
            for where, columns in (runs if name in kept else [(slice(None), None)])
        ]


def kept_value(row: Mapping[str, Any], name: str) -> Any:
    place = row.get(AS_COLUMNS)
    if place is None or name not in place.columns.schema.names:
        return row[name]
    (scalar,) = _decoded(place.columns.column(name).slice(place.number, 1))
    return Cell(scalar).in_python() if scalar.is_valid else None


def _rows_of(places: Sequence[KeptRow]) -> pa.RecordBatch:
    columns, first, *_ = places[0]
    numbers = [place.number for place in places]
    if numbers == list(range(first, first + len(numbers))):
        return columns.slice(first, len(numbers))
    return columns.take(pa.array(numbers))  # the chunks of late chunking, or all but the rows that failed
