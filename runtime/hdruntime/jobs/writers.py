"""Results of a batch job as bytes that can be appended to, and the file that they become."""

from __future__ import annotations

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
from hdruntime.jobs.arrow_columns import (
    INFERRED_TYPE,
    array_from_json,
    array_of_parts,
    cells_of_part,
    columns_with_dictionary,
    inferred_type,
    list_array,
    parquet_field,
    texts_of_column,
    types_in_json,
)
from hdruntime.jobs.checksums import Checksum, checksum_at
from hdruntime.jobs.json_cells import json_from_cells
from hdruntime.jobs.kept_columns import columns_in_parts
from hdruntime.jobs.shards import split_by_bytes
from hdruntime.jobs.state_folder import OUTPUT_FILE, RESULTS_FILE, damaged, remove, sync, synced

_BLOCK_BYTES = 2**20
"""Results of about this size are encoded together. The memory of small blocks is used again; that of blocks of 64 MB
comes from the system each time, which for token vectors took half as long as writing Parquet."""

_GROUP_ROWS = 4096
"""Rows of a Parquet row group. Readers prefer large groups; a writer holds one in memory."""

_GROUP_BYTES = 64 * 2**20
"""A row group with this many bytes is written, however few rows it has."""

ResultRows = Sequence[Mapping[str, object]]
Batches = Callable[[], Iterator[pa.RecordBatch]]
"""Reads all record batches; can be called several times."""


class ResultFormat(StrEnum):
    """How an output holds results; the value is the suffix of its name."""

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

    Fields of the schema with the metadata `INFERRED_TYPE` get their type when all rows are written.
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
            parts += (
                itertools.repeat(key),
                json_from_cells([*itertools.chain.from_iterable(map(cells_of_part, column))]),
            )
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
        columns = [array_of_parts(parts, field) for field, parts in zip(self._schema, in_parts, strict=True)]
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
        raise NotImplementedError

    def _inferred_schema(self, batches: Iterator[pa.RecordBatch]) -> pa.Schema:
        kinds: dict[str, set[type]] = {field.name: set() for field in self._schema if field.metadata == INFERRED_TYPE}
        for batch in batches if kinds else ():
            for name in kinds:
                kinds[name] |= types_in_json(batch.column(name))
        types = {name: inferred_type(of_values) for name, of_values in kinds.items()}
        return pa.schema([(field.name, types.get(field.name, field.type)) for field in self._schema])

    def _cast(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch with columns of the schema's types."""
        columns = []
        for column, kept, field in zip(batch.columns, self._schema, schema, strict=True):
            if kept.metadata == INFERRED_TYPE:
                column = array_from_json(column, field.type)
            elif column.type != field.type:
                column = list_array(column, field.type)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=schema)


class _ParquetResults(_ArrowResults):
    def _inferred_schema(self, batches: Iterator[pa.RecordBatch]) -> pa.Schema:
        return pa.schema([parquet_field(field) for field in super()._inferred_schema(batches)])

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        schema = self._inferred_schema(batches()).with_metadata(dict(metadata))
        with pa.parquet.ParquetWriter(file, schema, use_dictionary=columns_with_dictionary(schema)) as writer:
            for group in self._groups(batches(), schema):
                writer.write_table(group)

    def _groups(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            held.append(self._cast(batch, schema))
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
        schema = self._inferred_schema(batches()).with_metadata(dict(metadata))
        dictionaries = columns_with_dictionary(schema)
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
        schema = self._inferred_schema(batches())

        def column_of_ids(batch: pa.RecordBatch) -> pa.AnyArray:
            return self._cast(batch, schema).column("id")

        rows = missing = 0
        for batch in batches():
            rows, missing = rows + len(batch), missing + column_of_ids(batch).null_count
        kind = schema.field("id").type
        whole = pa.types.is_integer(kind) and not missing
        longest = (
            1
            if whole
            else max([1, *(len(text) for batch in batches() for text in texts_of_column(column_of_ids(batch)))])
        )
        dtype = np.dtype(kind.to_pandas_dtype() if whole else f"U{longest}")

        def ids_of(batch: pa.RecordBatch) -> AnyArray:
            ids = column_of_ids(batch)
            return np.array(ids.to_pylist() if whole else texts_of_column(ids), dtype)

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
