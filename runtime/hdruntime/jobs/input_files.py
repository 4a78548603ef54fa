"""A file of rows: its format, columns and compression, and its lines, in bounded memory."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from hdruntime.jobs.places import Place, Version, read_errors_explained
from hdruntime.jobs.rows import Position


class RowFormat(str, Enum):
    """How a file holds rows."""

    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    TEXT = "txt"
    PARQUET = "parquet"


_ENDINGS = {
    ".jsonl": RowFormat.JSONL,
    ".ndjson": RowFormat.JSONL,
    ".json": RowFormat.JSONL,
    ".csv": RowFormat.CSV,
    ".tsv": RowFormat.TSV,
    ".txt": RowFormat.TEXT,
    ".parquet": RowFormat.PARQUET,
}

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Ending -> Arrow's name."""

_BUFFER_BYTES = 2**18
"""Decompressed at a time."""

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is not read: a file without line ends would fill the memory. To tokenise so much takes 3 GB already."""

_SKIPPED_BYTES = 2**20
"""Read at a time of a line that is too long."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of rows, as it was found.

    Attributes:
        place: where it is.
        format: how it holds rows.
        version: of the file that was found.
        rows: number of rows; None if there are some, and their number is unknown before the file is read.
        columns: names, the partitions' last; for JSON Lines, the first rows' names.
        types: column -> Arrow type, if all values have the same.
        partitions: column -> value, from directories such as ``lang=en``.
    """

    place: Place
    format: RowFormat
    version: Version
    rows: int | None = None
    columns: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType]
    partitions: Mapping[str, object]

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return self.place.name

    def bytes_before(self, offset: int) -> int:
        """Bytes of the file before an offset, which counts rows if `rows` is known; 0 in a compressed file."""
        if self.rows is not None:
            return round(self.version.size_bytes * offset / self.rows)
        return 0 if self._compression else offset

    def opened(self, offset: int = 0) -> BinaryIO:
        """The file, decompressed, to be read from an offset in bytes.

        Raises:
            InputError, OSError: as `Place.opened`; the compressed data are damaged.
        """
        stream = self.place.opened()
        if self._compression is None:
            stream.seek(offset)
            return stream
        decompressed = io.BufferedReader(pa.CompressedInputStream(stream, self._compression), _BUFFER_BYTES)
        while offset and (block := decompressed.read(min(offset, _BUFFER_BYTES))):
            offset -= len(block)
        return decompressed

    @property
    def _compression(self) -> str | None:
        return _COMPRESSIONS.get(PurePosixPath(self.place.path.lower()).suffix)


def format_of(path: str) -> RowFormat | None:
    """The format by the ending of a name, for ``a.jsonl.gz`` the one before the compression's; None if unknown."""
    name = PurePosixPath(path.lower())
    if name.suffix in _COMPRESSIONS:
        inner = _ENDINGS.get(PurePosixPath(name.stem).suffix)
        return None if inner is RowFormat.PARQUET else inner
    return _ENDINGS.get(name.suffix)


class Line(NamedTuple):
    """A line of a file. A tuple, because these are made the fastest.

    Attributes:
        number: counted from 1.
        end: bytes of the file, decompressed, up to the line's end, the line end included.
        checksum: CRC-32 of those bytes.
        text: without its line feed; with replacement characters, or empty, if there is an error.
        error: why it cannot be read, else None.
    """

    number: int
    end: int
    checksum: int
    text: str
    error: str | None = None


def read_lines(file: InputFile, start: Position) -> Iterator[Line]:
    """The lines of a file after a position.

    Args:
        file: UTF-8, with or without a byte order mark; lines end with a line feed.
        start: where a line begins.

    Raises:
        InputError: the file cannot be read to its end, or is a pipe or a device.
    """
    offset, number, checksum = start.offset, start.line, start.checksum
    with read_errors_explained(file.name), file.opened(offset) as stream:
        while content := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            offset += len(content)
            checksum = zlib.crc32(content, checksum)
            if len(content) > MAX_LINE_BYTES and not content.endswith(b"\n"):
                while not content.endswith(b"\n") and (content := stream.readline(_SKIPPED_BYTES)):
                    offset += len(content)
                    checksum = zlib.crc32(content, checksum)
                reason = (
                    f"Line {number} has more than {MAX_LINE_BYTES} bytes, the maximum length of a line.\n"
                    "Split its text into several rows."
                )
                yield Line(number, offset, checksum, "", reason)
                continue
            if number == 1:
                content = content.removeprefix(codecs.BOM_UTF8)
            content = content.removesuffix(b"\n")
            try:
                yield Line(number, offset, checksum, content.decode())
            except UnicodeDecodeError as error:
                reason = f"Line {number} is not valid UTF-8: its byte {error.start + 1}, {error.reason}."
                yield Line(number, offset, checksum, content.decode(errors="replace"), reason)
