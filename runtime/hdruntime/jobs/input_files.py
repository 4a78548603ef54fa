"""A file of rows: its format, columns and compression, and its lines or Parquet rows, in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from hdruntime.errors import InputError
from hdruntime.jobs.rows import Position
from hdruntime.jobs.sources import LocalFile, Source, Version, read_errors_explained


class RowFormat(StrEnum):
    """How a file holds rows."""

    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    TEXT = "txt"
    PARQUET = "parquet"
    ARROW = "arrow"

    @property
    def is_columnar(self) -> bool:
        """Whether the format has columns with types, and positions in it count rows."""
        return self in (RowFormat.PARQUET, RowFormat.ARROW)


_ENDINGS = {
    ".jsonl": RowFormat.JSONL,
    ".ndjson": RowFormat.JSONL,
    ".json": RowFormat.JSONL,
    ".csv": RowFormat.CSV,
    ".tsv": RowFormat.TSV,
    ".txt": RowFormat.TEXT,
    ".parquet": RowFormat.PARQUET,
    ".arrow": RowFormat.ARROW,
    ".feather": RowFormat.ARROW,
}

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Ending -> Arrow's name."""

_BUFFER_BYTES = 2**18
"""Decompressed at a time."""

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is not read: a file without line ends would fill the memory. To tokenise so much takes 3 GB already."""

_SKIPPED_BYTES = 2**20
"""Read at a time of a line that is too long."""

_BLOCK_BYTES = 2**15
"""Lines of about this size are read at a time."""

_BATCH_ROWS = 256
"""Rows decoded at a time: of long documents, a few tens of megabytes."""

_ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's IPC file format; its stream format has none of its own."""

_PLAIN = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)
"""Types whose values convert to Python without loss."""


class ArrowBatches(NamedTuple):
    """An Arrow file, opened.

    Attributes:
        schema: schema of all its columns.
        batches: with the columns that were asked for.
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of rows, as it was found.

    Attributes:
        rows: number of rows; None if there are some, and their number is unknown before the file is read.
        columns: names, the partitions' last; for JSON Lines, the first rows' names.
        types: column -> Arrow type, if all values have the same.
        partitions: column -> value, from directories such as ``lang=en``.
    """

    source: Source
    format: RowFormat
    version: Version
    rows: int | None = None
    columns: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType]
    partitions: Mapping[str, object]

    @property
    def name(self) -> str:
        return self.source.name

    def bytes_before(self, offset: int) -> int:
        """Bytes of the file before an offset, which counts rows if `rows` is known; 0 in a compressed file, and in an
        Arrow file of a store."""
        if self.rows is not None:
            return round(self.version.size_bytes * offset / self.rows)
        return 0 if self._compression or self.format.is_columnar else offset

    @contextlib.contextmanager
    def opened(self, offset: int = 0) -> Iterator[BinaryIO]:
        """The file, decompressed, from an offset in bytes; InputError if it cannot be read."""
        with read_errors_explained(self.name), self._stream(offset) as stream:
            yield stream

    def version_now(self) -> Version:
        """The version of the file as it is now; an InputError if the file is missing."""
        with read_errors_explained(self.name):
            return self.source.version()

    def _stream(self, offset: int) -> BinaryIO:
        stream = self.source.opened()
        if self._compression is None:
            stream.seek(offset)
            return stream
        decompressed = io.BufferedReader(pa.CompressedInputStream(stream, self._compression), _BUFFER_BYTES)
        while offset and (block := decompressed.read(min(offset, _BUFFER_BYTES))):
            offset -= len(block)
        return decompressed

    @property
    def _compression(self) -> str | None:
        return _COMPRESSIONS.get(PurePosixPath(self.source.path.lower()).suffix)


def format_of(path: str) -> RowFormat | None:
    """The format by the suffix of a name, of ``a.jsonl.gz`` by ``.jsonl``; None if unknown."""
    name = PurePosixPath(path.lower())
    if name.suffix in _COMPRESSIONS:
        inner = _ENDINGS.get(PurePosixPath(name.stem).suffix)
        return None if inner is None or inner.is_columnar else inner
    return _ENDINGS.get(name.suffix)


Line = tuple[bytes | None, int, int, int]
"""A line's content with its line feed, its number, its end and its checksum; a plain tuple is the fastest to make.

The content is None if it is too long. The end is the number of bytes of the file, decompressed, up to the line's end,
and the checksum is the CRC-32 of those bytes.
"""


def read_lines(file: InputFile, start: Position) -> Iterator[Line]:
    """The lines of a file after a position where a line begins; InputError if it cannot be read to its end.

    The mark of UTF-8 at the begin of a file is no part of its first line.
    """
    offset, number, checksum = start.offset, start.line, start.checksum
    with file.opened(offset) as stream:
        while block := stream.read(_BLOCK_BYTES):
            if not block.endswith(b"\n"):
                block += stream.readline(MAX_LINE_BYTES + 1)
            lines: list[Any] = io.BytesIO(block).readlines()
            ends = [offset := offset + len(line) for line in lines]
            checksums = [checksum := zlib.crc32(line, checksum) for line in lines]
            if len(block) > MAX_LINE_BYTES:
                lines = [line if len(line.removesuffix(b"\n")) <= MAX_LINE_BYTES else None for line in lines]
                while lines[-1] is None and not block.endswith(b"\n") and (block := stream.readline(_SKIPPED_BYTES)):
                    ends[-1] = offset = offset + len(block)
                    checksums[-1] = checksum = zlib.crc32(block, checksum)
            if number == 0 and lines[0] is not None:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            yield from zip(lines, itertools.count(number + 1), ends, checksums, strict=False)
            number += len(lines)


def text_of_line(content: bytes | None, number: int) -> tuple[str, str | None]:
    """The text of a line without its line feed, and the reason why it is incomplete, if it is."""
    if content is None:
        return "", (
            f"Line {number} has more than {MAX_LINE_BYTES} bytes, the maximum length of a line.\n"
            "Split its text into several rows."
        )
    content = content.removesuffix(b"\n")
    try:
        return content.decode(), None
    except UnicodeDecodeError as error:
        reason = f"Line {number} is not valid UTF-8: its byte {error.start + 1}, {error.reason}."
        return content.decode(errors="replace"), reason


@dataclass(frozen=True)
class Undecodable:
    """Stands for a string that is not UTF-8, since Parquet writers do not check strings, or for a time too late."""

    reason: str


@dataclass(frozen=True)
class Cell:
    """A value of a type that Python does not hold without loss, as Arrow has it."""

    scalar: pa.Scalar

    def __reduce__(self) -> tuple[Callable[[pa.Array], Cell], tuple[pa.Array]]:
        # Arrow pickles Python's value of a scalar, without its nanoseconds, and no list of UUIDs.
        return _cell_of_array, (pa.repeat(self.scalar, 1),)

    def __str__(self) -> str:
        return str(self.in_python())

    def in_python(self) -> object:
        """The value in Python; as text if Python has no such value, such as a time in nanoseconds."""
        kind = self.scalar.type
        is_time = pa.types.is_time(kind) or pa.types.is_timestamp(kind)
        try:
            # Python would leave nanoseconds out.
            return self._text() if is_time and kind.unit == "ns" else self.scalar.as_py()
        except UnicodeDecodeError as error:
            return Undecodable(f"is not valid UTF-8: its byte {error.start + 1}, {error.reason}")
        except OverflowError:
            return Undecodable("holds a time outside of the years 1 to 9999")
        except ValueError:
            return self._text()

    def _text(self) -> str:
        return str(self.scalar.cast(pa.string()).as_py())


def _cell_of_array(array: pa.Array) -> Cell:
    return Cell(array[0])


def column_batches(file: InputFile, names: Sequence[str], *, start: int = 0) -> Iterator[pa.RecordBatch]:
    """The rows of the named columns of a Parquet or Arrow file, some at a time.

    `start` rows are skipped, of Parquet without reading earlier row groups. InputError if the file cannot be read to
    its end.
    """
    with read_errors_explained(file.name):
        try:
            if file.format is RowFormat.ARROW:
                with file.source.opened() as stream:
                    batches = arrow_batches(stream, names)
                    yield from _from_row(start, _in_slices(batches))
            else:
                with opened_parquet(file.source) as opened:
                    yield from _batches(opened, names, start)
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{file.name} cannot be read to its end: {error}.", hint="Write the file again."
            ) from error


def arrow_batches(stream: Any, names: Sequence[str] | None = None) -> ArrowBatches:
    """The record batches of an Arrow file of either IPC format, stream or file, with the named columns, or all.

    Raises Arrow's exceptions.
    """
    is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
    stream.seek(0)
    schema = (pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)).schema
    wanted = range(len(schema)) if names is None else sorted(map(schema.names.index, names))
    options = pa.ipc.IpcReadOptions(included_fields=list(wanted), use_threads=False)
    stream.seek(0)
    if not is_file:
        return ArrowBatches(schema, iter(pa.ipc.open_stream(stream, options=options)))
    file = pa.ipc.open_file(stream, options=options)
    return ArrowBatches(schema, (file.get_batch(number) for number in range(file.num_record_batches)))


def _in_slices(batches: ArrowBatches) -> Iterator[pa.RecordBatch]:
    """The batches in parts of few rows, since a file may have all rows in one batch."""
    for batch in batches.batches:
        for first in range(0, len(batch), _BATCH_ROWS):
            yield batch.slice(first, _BATCH_ROWS)


def _from_row(start: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches without the first rows."""
    for batch in batches:
        if start < len(batch):
            yield batch.slice(start)
        start = max(0, start - len(batch))


def opened_parquet(source: Source) -> Any:
    """The file, opened by Arrow; raises its exceptions and OSError."""
    return pa.parquet.ParquetFile(source.file if isinstance(source, LocalFile) else source.opened(), pre_buffer=False)


def _batches(opened: Any, names: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
    group, left_out = _group_of_row(opened.metadata, start)
    # One thread, unbuffered: memory holds only the pages in use, however large a row group is. A scan of
    # pyarrow.dataset reads ahead and cannot begin at a row group.
    batches = opened.iter_batches(
        batch_size=_BATCH_ROWS,
        row_groups=list(range(group, opened.metadata.num_row_groups)),
        columns=names,
        use_threads=False,
    )
    yield from _from_row(left_out, batches)


def _group_of_row(metadata: Any, row: int) -> tuple[int, int]:
    """The row group that holds a row, and the row's index in it."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < rows:
            return group, row
        row -= rows
    return metadata.num_row_groups, 0


def cells_of_column(column: Any) -> list[Any]:
    """The cells of a column; `Undecodable` in place of a string that is not UTF-8.

    Texts, numbers and lists of numbers are Python values; others are a `Cell`. None is null.
    """
    kind = column.type
    while hasattr(kind, "value_type") and not isinstance(kind, pa.BaseExtensionType):  # of lists and dictionaries
        kind = kind.value_type
    if not any(is_one(kind) for is_one in _PLAIN):
        return [Cell(scalar) if scalar.is_valid else None for scalar in column]
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [Cell(scalar).in_python() for scalar in column]
