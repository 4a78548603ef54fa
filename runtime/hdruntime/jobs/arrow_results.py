"""Results of a batch job as Arrow record batches, to which more can be appended, and the Parquet file they become."""

from __future__ import annotations

__all__ = ["OPEN_TYPE", "ArrowResults", "ParquetResults", "json_from_value"]

import base64
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hdruntime.jobs.files import OpenFolder
from hdruntime.jobs.parquet_rows import is_plain, python_from_scalar

OPEN_TYPE = {b"hdexport": b"open type"}
"""Metadata of a string field whose values are JSON: its type is known when all of them are."""

_GROUP_ROWS = 4096
"""Rows of a Parquet row group. Readers like large ones; each one's writer holds it in memory."""

_GROUP_BYTES = 64 * 2**20
"""A row group is written when its columns reach this, however few its rows."""

_TYPES = {
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({int, float}): pa.float64(),
    frozenset({float}): pa.float64(),
}
"""Python types of all values -> type of the column; of others, strings, as JSON where a value is none."""


def _json_default(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_json_default).encode
"""As `json.dumps`, which makes an encoder for every value."""

Results = Sequence[Mapping[str, object]]


def json_from_value(value: object) -> str:
    """A value as JSON, on one line; null for NaN and infinity, which JSON lacks."""
    if value is None:
        return "null"
    if isinstance(value, np.ndarray):
        # Nine digits are what it takes to read back the same float32, and float16; json would write up to seventeen.
        return f"[{', '.join([f'{number:.9g}' for number in value.tolist()])}]"
    if isinstance(value, pa.Scalar):
        value = python_from_scalar(value)
    try:
        return _ENCODE(value)
    except ValueError:
        finite = json.loads(json.dumps(value, default=_json_default), parse_constant=lambda name: None)
        return json.dumps(finite, ensure_ascii=False)


class ArrowResults(ABC):
    """Results as a stream of record batches, of which a file is made at the end.

    Args:
        schema: of the output; fields whose metadata is `OPEN_TYPE` get their type at the end.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def begin(self) -> bytes:
        """What comes before all rows."""
        return bytes(self._schema.serialize())

    def encode(self, rows: Results) -> bytes:
        """Some rows, each a value for every column, None for no value."""
        columns = [_array([row[field.name] for row in rows], field) for field in self._schema]
        return bytes(pa.RecordBatch.from_arrays(columns, schema=self._schema).serialize())

    def finish(self, folder: OpenFolder, encoded: str, finished: str, *, metadata: Mapping[str, str]) -> None:
        """Make the output; see `hdruntime.jobs.writers.ResultEncoding`."""
        with open(folder.open(encoded, os.O_RDONLY), "rb") as source, folder.replacing(finished) as file:

            def batches() -> Iterator[pa.RecordBatch]:
                source.seek(0)
                with pa.ipc.open_stream(source) as stream:
                    yield from stream

            self._write(batches, file, metadata)

    @abstractmethod
    def _write(
        self, batches: Callable[[], Iterator[pa.RecordBatch]], file: BinaryIO, metadata: Mapping[str, str]
    ) -> None:
        """Write the output of all record batches, which can be read several times."""

    def _closed_schema(self, batches: Iterator[pa.RecordBatch]) -> pa.Schema:
        """The schema with the types that open fields turn out to have."""
        kinds: dict[str, set[type]] = {field.name: set() for field in self._schema if field.metadata == OPEN_TYPE}
        for batch in batches if kinds else ():
            for name, found in kinds.items():
                found.update(_kind(value) for value in _values(batch.column(name)) if value is not None)
        types = {name: _TYPES.get(frozenset(found), pa.string()) for name, found in kinds.items()}
        return pa.schema([(field.name, types.get(field.name, field.type)) for field in self._schema])

    def _closed(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch with values of those types."""
        columns = [
            _closed_array(column, field.type) if own.metadata == OPEN_TYPE else column
            for column, own, field in zip(batch.columns, self._schema, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)


class ParquetResults(ArrowResults):
    """A Parquet file ends with its table of contents, so nothing can be added to one."""

    def _write(
        self, batches: Callable[[], Iterator[pa.RecordBatch]], file: BinaryIO, metadata: Mapping[str, str]
    ) -> None:
        schema = self._closed_schema(batches()).with_metadata(dict(metadata))
        with pa.parquet.ParquetWriter(file, schema) as writer:
            held: list[pa.RecordBatch] = []
            for batch in batches():
                held.append(self._closed(batch, schema))
                if sum(len(part) for part in held) >= _GROUP_ROWS or sum(part.nbytes for part in held) >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held))
                    held = []
            if held:
                writer.write_table(pa.Table.from_batches(held))


def _array(cells: list[Any], field: pa.Field) -> pa.Array:
    if field.metadata == OPEN_TYPE:
        cells = [None if cell is None else json_from_value(cell) for cell in cells]
    elif pa.types.is_fixed_size_list(field.type) and any(isinstance(cell, np.ndarray) for cell in cells):
        return _vectors(cells, field.type)
    elif not is_plain(field.type):
        cells = [cell.cast(field.type) if isinstance(cell, pa.Scalar) else cell for cell in cells]
    return pa.array(cells, type=field.type)


def _vectors(cells: list[Any], kind: pa.DataType) -> pa.Array:
    zeros = np.zeros(kind.list_size, kind.value_type.to_pandas_dtype())
    flat = np.concatenate([zeros if cell is None else cell for cell in cells])
    mask = pa.array([cell is None for cell in cells])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), type=kind, mask=mask)


def _values(column: pa.Array) -> list[Any]:
    return [None if text is None else json.loads(text) for text in column.to_pylist()]


def _kind(value: object) -> type:
    # Beyond 64 bits, an integer is text.
    return str if isinstance(value, int) and not -(2**63) <= value < 2**63 else type(value)


def _closed_array(column: pa.Array, kind: pa.DataType) -> pa.Array:
    values = _values(column)
    if pa.types.is_string(kind):
        values = [value if value is None or isinstance(value, str) else json_from_value(value) for value in values]
    return pa.array(values, type=kind)
