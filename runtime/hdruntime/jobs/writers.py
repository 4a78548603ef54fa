"""Results of a batch job as bytes that can be appended to, and the file that they become."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hdruntime.arrays import AnyArray
from hdruntime.errors import InputError
from hdruntime.inference.batching import grouped
from hdruntime.jobs.checksums import Checksum, checksum_at
from hdruntime.jobs.input_files import Cell, cells_of_column
from hdruntime.jobs.kept_columns import columns_in_parts
from hdruntime.jobs.shards import split_by_bytes
from hdruntime.jobs.state_folder import OUTPUT_FILE, RESULTS_FILE, damaged, remove, sync, synced
from hdruntime.jobs.vectors import COLUMN

OPEN_TYPE = {b"hdexport": b"open type"}
"""Metadata of a string field whose values are JSON; its type is known when all rows are done."""

_BLOCK_BYTES = 2**20
"""Results of about this size are encoded together. The memory of small blocks is used again; that of blocks of 64 MB
comes from the system each time, which for token vectors took half as long as writing Parquet."""

_NUMBERS = 2**18
"""Numbers of vectors that become JSON together, also of a text with more: a few MB of text."""

_GROUP_ROWS = 4096
"""Rows of a Parquet row group. Readers prefer large groups; a writer holds one in memory."""

_GROUP_BYTES = 64 * 2**20
"""A row group with this many bytes is written, however few rows it has."""

_TYPES = {
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({np.int64}): pa.int64(),
    frozenset({int, np.int64}): pa.int64(),
    frozenset({int, float}): pa.float64(),
    frozenset({float}): pa.float64(),
}
"""`_kind` of all values -> type of the column. Other columns are strings, with JSON for values that are not."""

ResultRows = Sequence[Mapping[str, object]]
Batches = Callable[[], Iterator[pa.RecordBatch]]
"""Reads all record batches; can be called several times."""


class ResultFormat(StrEnum):
    """How an output holds results; the value is the ending of its name."""

    PARTS = ""
    """A directory of Parquet files, which readers take for one data set."""
    JSONL = ".jsonl"
    PARQUET = ".parquet"
    NPY = ".npy"
    NPZ = ".npz"

    @property
    def is_matrix(self) -> bool:
        """Whether the format holds only vectors and arrays of one number per row."""
        return self in (ResultFormat.NPY, ResultFormat.NPZ)

    @property
    def has_metadata(self) -> bool:
        """Whether the format has a place for metadata."""
        return self not in (ResultFormat.JSONL, ResultFormat.NPY)


_PART = re.compile(r"part-\d{5,}\.parquet")
"""Names of the files of a directory."""

_PART_ROWS = 1_000_000
_PART_BYTES = 512 * 2**20
"""A part with so many rows, or bytes in memory, is full."""


def is_part(name: str) -> bool:
    """Whether a file of a directory has the name that a job gives it."""
    return _PART.fullmatch(name) is not None


def encoding_of(kind: ResultFormat, fields: Sequence[pa.Field]) -> ResultEncoding:
    """The encoding of results with these columns."""
    return _ENCODINGS[kind](pa.schema(list(fields)))


class ResultEncoding(ABC):
    """How results are kept while the job runs: bytes to which more can be appended after any block of `encode`.

    Fields of the schema with the metadata `OPEN_TYPE` get their type at the end.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    @abstractmethod
    def start(self) -> bytes:
        """The bytes before the first row."""

    def encode(self, rows: ResultRows) -> Iterator[bytes | memoryview]:
        """Rows, each with a value for every column, None for no value; in blocks, which bound memory."""
        return map(self._encoded_rows, split_by_bytes(rows, max_bytes=_BLOCK_BYTES))

    @abstractmethod
    def _encoded_rows(self, rows: ResultRows) -> bytes | memoryview:
        """Rows of one block."""

    @abstractmethod
    def finish(self, folder: Path, *, written: Checksum, metadata: Mapping[str, str]) -> Path:
        """Make the output of the folder's `RESULTS_FILE`, on the disk; its path: `OUTPUT_FILE`, or the results.

        DamagedJobError if the results that are read do not have the checksum `written`.
        """


class _JsonLines(ResultEncoding):
    """Lines are kept in their final form."""

    def start(self) -> bytes:
        return b""

    def _encoded_rows(self, rows: ResultRows) -> bytes:
        parts: list[Iterable[str]] = []
        for name, column in zip(self._schema.names, columns_in_parts(rows, self._schema.names), strict=True):
            key = f"{', ' if parts else '{'}{json.dumps(name)}: "
            parts += (itertools.repeat(key), _json_from_cells([*itertools.chain.from_iterable(map(_cells, column))]))
        lines = zip(*parts, itertools.repeat("}\n"))
        return "".join(itertools.chain.from_iterable(lines)).encode()

    def finish(self, folder: Path, *, written: Checksum, metadata: Mapping[str, str]) -> Path:
        return folder / RESULTS_FILE


class _ChecksumReader(io.BufferedReader):
    """Computes the checksum of what is read."""

    checksum = Checksum()

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.checksum = self.checksum.after(data)
        return data


class _ArrowResults(ResultEncoding):
    """A stream of record batches, from which the file is made at the end."""

    def start(self) -> bytes:
        return bytes(self._schema.serialize())

    def _encoded_rows(self, rows: ResultRows) -> memoryview:
        in_parts = columns_in_parts(rows, self._schema.names)
        columns = [_array(parts, field) for field, parts in zip(self._schema, in_parts, strict=True)]
        return memoryview(pa.RecordBatch.from_arrays(columns, schema=self._schema).serialize())

    def finish(self, folder: Path, *, written: Checksum, metadata: Mapping[str, str]) -> Path:
        output = folder / OUTPUT_FILE
        remove(output)  # a part of it, from a process that was killed
        with self._encoded(folder, written) as batches:
            self._make(output, batches, metadata)
        return output

    @contextlib.contextmanager
    def _encoded(self, folder: Path, written: Checksum) -> Iterator[Batches]:
        with _ChecksumReader(io.FileIO(folder / RESULTS_FILE)) as source:

            def batches() -> Iterator[pa.RecordBatch]:
                source.seek(0)
                source.checksum = Checksum()
                with pa.ipc.open_stream(source) as stream:
                    yield from stream
                if source.checksum != written:
                    raise damaged(folder, f"{RESULTS_FILE} has changed")

            try:
                yield batches
            except (pa.ArrowInvalid, OSError) as error:
                if checksum_at(folder / RESULTS_FILE) == written:
                    raise
                raise damaged(folder, f"{RESULTS_FILE} has changed") from error

    def _make(self, output: Path, batches: Batches, metadata: Mapping[str, str]) -> None:
        with synced(output) as file:
            self._write(batches, file, metadata)

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        """Write an output that is a file."""
        raise NotImplementedError

    def _closed_schema(self, batches: Iterator[pa.RecordBatch]) -> pa.Schema:
        """The schema with types for the open fields."""
        kinds: dict[str, set[type]] = {field.name: set() for field in self._schema if field.metadata == OPEN_TYPE}
        for batch in batches if kinds else ():
            for name, found in kinds.items():
                found.update(_kind(value) for value in _values(batch.column(name)) if value is not None)
        types = {name: _TYPES.get(frozenset(found), pa.string()) for name, found in kinds.items()}
        return pa.schema([(field.name, types.get(field.name, field.type)) for field in self._schema])

    def _closed(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch with values of those types."""
        columns = []
        for column, own, field in zip(batch.columns, self._schema, schema, strict=True):
            if own.metadata == OPEN_TYPE:
                column = _closed_array(column, field.type)
            elif column.type != field.type:
                column = _list_array(column, field.type)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def parquet_field(field: pa.Field) -> pa.Field:
    """A column of results as Parquet has it: vectors are lists without a fixed size.

    Of lists of a fixed size, pyarrow before 26 reads none that is null, as a failed row's is.
    """
    if field.name != COLUMN or not pa.types.is_fixed_size_list(field.type):
        return field
    return field.with_type(pa.list_(field.type.value_type))


class _ParquetResults(_ArrowResults):
    def _closed_schema(self, batches: Iterator[pa.RecordBatch]) -> pa.Schema:
        return pa.schema([parquet_field(field) for field in super()._closed_schema(batches)])

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        schema = self._closed_schema(batches()).with_metadata(dict(metadata))
        with pa.parquet.ParquetWriter(file, schema, use_dictionary=_columns_of_a_dictionary(schema)) as writer:
            for group in self._groups(batches(), schema):
                writer.write_table(group)

    def _groups(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
        """The row groups."""
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            held.append(self._closed(batch, schema))
            rows, size = rows + len(batch), size + held[-1].nbytes
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
        if held:
            yield pa.Table.from_batches(held)


class _PartsResults(_ParquetResults):
    """Parquet files in a directory; the last one may be small, and without rows there is one without rows."""

    def _make(self, output: Path, batches: Batches, metadata: Mapping[str, str]) -> None:
        output.mkdir()
        schema = self._closed_schema(batches()).with_metadata(dict(metadata))
        dictionaries = _columns_of_a_dictionary(schema)
        groups = self._groups(batches(), schema)
        group = next(groups, schema.empty_table())
        for number in itertools.count():
            with (
                synced(output / f"part-{number:05}.parquet") as file,
                pa.parquet.ParquetWriter(file, schema, use_dictionary=dictionaries) as writer,
            ):
                rows = size = 0
                while group is not None and rows < _PART_ROWS and size < _PART_BYTES:
                    writer.write_table(group)
                    rows, size, group = rows + len(group), size + group.nbytes, next(groups, None)
            if group is None:
                break
        sync(output)


class _NpyResults(_ArrowResults):
    """One array: the vectors, NaN in failed rows."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        vectors = schema.field("embedding").type
        self._width, self._dtype = vectors.list_size, np.dtype(vectors.value_type.to_pandas_dtype())

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        rows = sum(len(batch) for batch in batches())
        _write_array(file, (rows, self._width), self._dtype, map(self._matrix, batches()))

    def _matrix(self, batch: pa.RecordBatch) -> AnyArray:
        column = batch.column("embedding")
        values = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self._width)
        if not column.null_count:
            return values
        # Integers have no NaN, and their jobs leave out failed rows.
        missing = np.nan if self._dtype.kind == "f" else 0
        matrix = np.full((len(batch), self._width), missing, self._dtype)
        matrix[column.is_valid().to_numpy(zero_copy_only=False)] = values
        return matrix


class _NpzResults(_NpyResults):
    """Arrays ``embedding``, ``id``, ``tokens``, ``failed``, ``metadata`` (JSON); ``chunk``, ``start``, ``end``,
    ``truncated``, ``tokens_given``.

    Numbers are 0, and ``truncated`` is False, in rows without them. Ids are integers, or strings if any is something
    else or missing (then "").
    """

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        schema = self._closed_schema(batches())

        def column_of_ids(batch: pa.RecordBatch) -> pa.AnyArray:
            return self._closed(batch, schema).column("id")

        rows = missing = 0
        for batch in batches():
            rows, missing = rows + len(batch), missing + column_of_ids(batch).null_count
        kind = schema.field("id").type
        whole = pa.types.is_integer(kind) and not missing
        longest = 1 if whole else max([1, *(len(text) for batch in batches() for text in _texts(column_of_ids(batch)))])
        dtype = np.dtype(kind.to_pandas_dtype() if whole else f"U{longest}")

        def ids_of(batch: pa.RecordBatch) -> AnyArray:
            ids = column_of_ids(batch)
            return np.array(ids.to_pylist() if whole else _texts(ids), dtype)

        def numbers(name: str) -> Callable[[pa.RecordBatch], AnyArray]:
            return lambda batch: batch.column(name).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)

        def failed(batch: pa.RecordBatch) -> AnyArray:
            return batch.column("error").is_valid().to_numpy(zero_copy_only=False)

        def truncated(batch: pa.RecordBatch) -> AnyArray:
            return batch.column("truncated").fill_null(False).to_numpy(zero_copy_only=False)

        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any], Callable[[pa.RecordBatch], AnyArray]]] = {
            "embedding": ((rows, self._width), self._dtype, self._matrix),
            "id": ((rows,), dtype, ids_of),
            **{
                name: ((rows,), np.dtype(np.int32), numbers(name))
                for name in ("chunk", "start", "end", "tokens", "tokens_given")
                if name in schema.names
            },
            **({"truncated": ((rows,), np.dtype(bool), truncated)} if "truncated" in schema.names else {}),
            "failed": ((rows,), np.dtype(bool), failed),
        }
        with zipfile.ZipFile(file, "w") as archive:
            # ZipInfo has a fixed date: the same job writes the same bytes.
            for name, (shape, kind, part) in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    _write_array(member, shape, kind, map(part, batches()))
            with archive.open(zipfile.ZipInfo("metadata.npy"), "w") as member:
                np.lib.format.write_array(member, np.array(json.dumps(metadata)))


_ENCODINGS: Mapping[ResultFormat, Callable[[pa.Schema], ResultEncoding]] = {
    ResultFormat.PARTS: _PartsResults,
    ResultFormat.JSONL: _JsonLines,
    ResultFormat.PARQUET: _ParquetResults,
    ResultFormat.NPY: _NpyResults,
    ResultFormat.NPZ: _NpzResults,
}


def _write_array(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any], parts: Iterable[AnyArray]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for part in parts:
        file.write(np.ascontiguousarray(part).data)


def _columns_of_a_dictionary(schema: pa.Schema) -> list[str]:
    """Parquet's columns that a dictionary makes smaller: all but vectors of float32, where few values repeat."""
    file = pa.BufferOutputStream()
    pa.parquet.ParquetWriter(file, schema).close()
    found = pa.parquet.ParquetFile(pa.BufferReader(file.getvalue())).schema
    columns = map(found.column, range(len(found)))
    return [each.path for each in columns if (each.path.partition(".")[0], each.physical_type) != (COLUMN, "FLOAT")]


def _array(parts: Sequence[Any], field: pa.Field) -> pa.AnyArray:
    try:
        arrays = [_array_of_part(part, field) for part in parts]
    except (pa.ArrowInvalid, OverflowError) as error:
        raise InputError(
            f"The column {field.name!r} is {field.type} for all inputs together, and a value does not fit: {error}.",
            hint="Give the inputs one type, or write .jsonl.",
        ) from error
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _array_of_part(part: Any, field: pa.Field) -> pa.AnyArray:
    if isinstance(part, pa.Array) and part.type == field.type and field.metadata != OPEN_TYPE:
        return part
    return array_of_cells(_cells(part), field)


def _cells(part: Any) -> list[Any]:
    return cells_of_column(part) if isinstance(part, pa.Array) else part


def array_of_cells(cells: list[Any], field: pa.Field) -> pa.AnyArray:
    """A column of a field's type; a NumPy array is a list, or with two axes a list of lists."""
    if field.metadata == OPEN_TYPE:
        cells = [None if cell is None else _json_from_value(cell) for cell in cells]
    elif np.ndarray in (types := set(map(type, cells))):
        if types <= {np.ndarray, type(None)} and _is_of_vectors(field.type):
            return _array_of_arrays(cells, field.type)
        # Arrow takes arrays of one dimension.
        cells = [None if cell is None else [*cell] for cell in cells]
    elif any(isinstance(cell, Cell) for cell in cells):
        return pa.concat_arrays([_array_of_one(cell, field.type) for cell in cells])
    return pa.array(cells, type=field.type)


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


def _list_array(column: pa.AnyArray, kind: pa.DataType) -> pa.AnyArray:
    """A column of lists of a fixed size as one of lists.

    A cast leaves entries in lists that are null, which pyarrow 22 does not write to Parquet.
    """
    is_there = column.is_valid().to_numpy(zero_copy_only=False)
    ends = np.cumsum([0, *(is_there * column.type.list_size)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column.flatten(), type=kind, mask=pa.array(~is_there))


def _closed_array(column: pa.AnyArray, kind: pa.DataType) -> pa.AnyArray:
    values = _values(column)
    if pa.types.is_string(kind):
        values = [None if value is None else _text(value) for value in values]
    return pa.array(values, type=kind)


def _texts(column: pa.AnyArray) -> list[str]:
    return [_text(Cell(scalar)) if scalar.is_valid else "" for scalar in column]


def _text(value: object) -> str:
    """A value as text: a JSON string without its quotation marks, anything else as JSON."""
    encoded = _json_from_value(value)
    return str(json.loads(encoded)) if encoded.startswith('"') else encoded


def _values(column: pa.AnyArray) -> list[Any]:
    texts = ["null" if text is None else text for text in column.to_pylist()]
    values: list[Any] = json.loads(f"[{', '.join(texts)}]")
    return values


def _kind(value: object) -> type:
    """A value's type in Python; int64 for an integer that a float may not hold, str for one beyond 64 bits."""
    if not isinstance(value, int) or abs(value) <= 2**53:
        return type(value)
    return np.int64 if -(2**63) <= value < 2**63 else str


def _json_default(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_json_default).encode
"""As `json.dumps`, which makes an encoder for every value."""


def _json_from_value(value: object) -> str:
    """A value as JSON, on one line; null for NaN and infinity, which JSON lacks."""
    if value is None:
        return "null"
    if type(value) is int:
        return str(value)
    if isinstance(value, Cell):
        value = value.in_python()
    try:
        return _ENCODE(value)
    except ValueError:
        finite = json.loads(json.dumps(value, default=_json_default), parse_constant=lambda name: None)
        return json.dumps(finite, ensure_ascii=False)


def _json_from_cells(cells: list[Any]) -> Iterable[str]:
    """The values of a column as JSON; of NumPy arrays all numbers together, which is faster than one by one."""
    if np.ndarray not in set(map(type, cells)):
        return map(_json_from_value, cells)
    arrays = [cell for cell in cells if cell is not None]
    vectors = _json_from_vectors([vector for cell in arrays for vector in (cell if cell.ndim > 1 else (cell,))])
    return [
        "null"
        if cell is None
        else f"[{', '.join(itertools.islice(vectors, len(cell)))}]"
        if cell.ndim > 1
        else next(vectors)
        for cell in cells
    ]


def _json_from_vectors(vectors: Sequence[AnyArray]) -> Iterator[str]:
    """Vectors as JSON: numbers with the fewest digits that identify a float32, and null for NaN and infinity."""
    from pyarrow import compute  # which takes long to load, and which other outputs go without

    for some in grouped([len(vector) for vector in vectors], max_items=len(vectors), max_total=_NUMBERS):
        values = np.concatenate(vectors[some])
        if values.dtype == np.float16:
            # Of these Arrow writes all digits.
            values = values.astype(np.float32)
        texts = pa.array(values, mask=~np.isfinite(values)).cast(pa.string()).fill_null("null")
        ends = np.cumsum([0, *map(len, vectors[some])])
        joined = compute.binary_join(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), texts), ", ")
        yield from map("[{}]".format, joined.to_pylist())
