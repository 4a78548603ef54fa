"""Columns of results in Arrow, among them columns whose type is known when all rows are done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hdruntime.arrays import AnyArray
from hdruntime.errors import InputError
from hdruntime.jobs.input_files import Cell, cells_of_column
from hdruntime.jobs.json_cells import json_from_value, text_of_value, values_from_json
from hdruntime.jobs.vectors import COLUMN

INFERRED_TYPE = {b"hdexport": b"inferred type"}
"""Metadata of a string field whose values are JSON; its type is known when all rows are done."""

_TYPES = {
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({np.int64}): pa.int64(),
    frozenset({int, np.int64}): pa.int64(),
    frozenset({int, float}): pa.float64(),
    frozenset({float}): pa.float64(),
}
"""Types of all values -> type of the column. Other columns are strings, with JSON for values that are not."""


def array_of_parts(parts: Sequence[Any], field: pa.Field) -> pa.AnyArray:
    """A column of a field's type from its parts, each an Arrow array or a list of cells.

    Raises:
        InputError: a value does not fit the type.
    """
    try:
        arrays = [_array_of_part(part, field) for part in parts]
    except (pa.ArrowInvalid, OverflowError) as error:
        raise InputError(
            f"The column {field.name!r} is {field.type} for all inputs together, and a value does not fit: {error}.",
            hint="Give the inputs one type, or write .jsonl.",
        ) from error
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def array_of_cells(cells: list[Any], field: pa.Field) -> pa.AnyArray:
    """A column of a field's type; a NumPy array is a list, or with two axes a list of lists."""
    if field.metadata == INFERRED_TYPE:
        cells = [None if cell is None else json_from_value(cell) for cell in cells]
    elif np.ndarray in (types := set(map(type, cells))):
        if types <= {np.ndarray, type(None)} and _is_of_vectors(field.type):
            return _array_of_arrays(cells, field.type)
        # Arrow takes arrays of one dimension.
        cells = [None if cell is None else [*cell] for cell in cells]
    elif any(isinstance(cell, Cell) for cell in cells):
        return pa.concat_arrays([_array_of_one(cell, field.type) for cell in cells])
    return pa.array(cells, type=field.type)


def cells_of_part(part: Any) -> list[Any]:
    """The cells of a part of a column: of an Arrow array, or the list itself."""
    return cells_of_column(part) if isinstance(part, pa.Array) else part


def texts_of_column(column: pa.AnyArray) -> list[str]:
    """The values of a column as texts; empty where it is null."""
    return [text_of_value(Cell(scalar)) if scalar.is_valid else "" for scalar in column]


def list_array(column: pa.AnyArray, kind: pa.DataType) -> pa.AnyArray:
    """A column of lists of a fixed size as one of lists.

    A cast leaves entries in lists that are null, which pyarrow 22 does not write to Parquet.
    """
    is_there = column.is_valid().to_numpy(zero_copy_only=False)
    ends = np.cumsum([0, *(is_there * column.type.list_size)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column.flatten(), type=kind, mask=pa.array(~is_there))


def array_from_json(column: pa.AnyArray, kind: pa.DataType) -> pa.AnyArray:
    """A column whose values are JSON, as one of that type."""
    values = values_from_json(column)
    if pa.types.is_string(kind):
        values = [None if value is None else text_of_value(value) for value in values]
    return pa.array(values, type=kind)


def types_in_json(column: pa.AnyArray) -> set[type]:
    """The types of a column's values, which are JSON, for `inferred_type`."""
    return {_type_of_value(value) for value in values_from_json(column) if value is not None}


def inferred_type(types: set[type]) -> pa.DataType:
    """The type of a column whose values have these types."""
    return _TYPES.get(frozenset(types), pa.string())


def parquet_field(field: pa.Field) -> pa.Field:
    """A column of results as Parquet has it: vectors are lists without a fixed size.

    Of lists of a fixed size, pyarrow before 26 reads none that is null, as a failed row's is.
    """
    if field.name != COLUMN or not pa.types.is_fixed_size_list(field.type):
        return field
    return field.with_type(pa.list_(field.type.value_type))


def columns_with_dictionary(schema: pa.Schema) -> list[str]:
    """Parquet's columns that a dictionary makes smaller: all but vectors of float32, where few values repeat."""
    file = pa.BufferOutputStream()
    pa.parquet.ParquetWriter(file, schema).close()
    written = pa.parquet.ParquetFile(pa.BufferReader(file.getvalue())).schema
    columns = map(written.column, range(len(written)))
    return [each.path for each in columns if (each.path.partition(".")[0], each.physical_type) != (COLUMN, "FLOAT")]


def _type_of_value(value: object) -> type:
    """A value's type in Python; int64 for an integer that a float may not hold, str for one beyond 64 bits."""
    if not isinstance(value, int) or abs(value) <= 2**53:
        return type(value)
    return np.int64 if -(2**63) <= value < 2**63 else str


def _array_of_part(part: Any, field: pa.Field) -> pa.AnyArray:
    if isinstance(part, pa.Array) and part.type == field.type and field.metadata != INFERRED_TYPE:
        return part
    return array_of_cells(cells_of_part(part), field)


def _is_of_vectors(kind: pa.DataType) -> bool:
    """Whether it is lists of numbers, or of lists of a fixed size of numbers, as built-in tasks have them."""
    if pa.types.is_list(kind) and pa.types.is_fixed_size_list(kind.value_type):
        kind = kind.value_type
    return (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)) and pa.types.is_primitive(kind.value_type)


def _array_of_arrays(cells: Sequence[AnyArray | None], kind: pa.DataType) -> pa.AnyArray:
    """A column of one array per cell: numbers, [values], or vectors of a fixed size, [vectors, dimensions]."""
    mask = pa.array([cell is None for cell in cells])
    if not pa.types.is_fixed_size_list(kind):
        ends = np.cumsum([0, *(0 if cell is None else len(cell) for cell in cells)])
        entries = _joined([cell for cell in cells if cell is not None], kind.value_type)
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), entries, type=kind, mask=mask)
    # A null of a fixed size has a place among the values.
    nothing = np.zeros(kind.list_size, kind.value_type.to_pandas_dtype())
    return _fixed_lists([nothing if cell is None else cell for cell in cells], kind, mask=mask)


def _joined(cells: Sequence[AnyArray], kind: pa.DataType) -> pa.AnyArray:
    """The entries of all cells, of that type."""
    return _fixed_lists(cells, kind) if pa.types.is_fixed_size_list(kind) else pa.array(np.concatenate(cells), kind)


def _fixed_lists(cells: Sequence[AnyArray], kind: pa.DataType, *, mask: pa.AnyArray | None = None) -> pa.AnyArray:
    """The vectors of all cells; where the mask is true, null."""
    if wrong := {cell.shape[-1] for cell in cells} - {kind.list_size}:
        raise pa.ArrowInvalid(f"its length is {min(wrong)}")
    values = pa.array(np.concatenate(cells, axis=None), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)


def _array_of_one(cell: Any, kind: pa.DataType) -> pa.AnyArray:
    """An array of one cell; Arrow makes none of several scalars where a list holds an extension, such as a UUID."""
    if not isinstance(cell, Cell):
        return pa.array([cell], kind)
    return pa.repeat(cell.scalar if cell.scalar.type == kind else cell.scalar.cast(kind), 1)
