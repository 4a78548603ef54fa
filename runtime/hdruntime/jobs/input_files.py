"""A file of rows: its format, its columns, its compression, and how far into it a row is."""

from __future__ import annotations

__all__ = ["InputFile", "RowFormat", "compression_of", "format_of"]

import io
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import BinaryIO

import pyarrow as pa

from hdruntime.jobs.places import Place, Version


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
"""Ending -> Arrow's name of it."""

_BUFFER_BYTES = 2**18
"""Decompressed at a time."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of rows, as it was found.

    Attributes:
        place: where it is.
        format: how it holds rows.
        version: of the file that was found.
        rows: how many it has; None where only reading it would tell.
        columns: names, those of the partitions last; for JSON Lines, those of the first rows.
        types: column -> Arrow type, where all values have one.
        partitions: column -> value, from directories such as ``lang=en``.
        has_ids: whether the column ``id`` has strings or integers; of JSON Lines, in all of the first rows.
    """

    place: Place
    format: RowFormat
    version: Version
    rows: int | None = None
    columns: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType]
    partitions: Mapping[str, object]
    has_ids: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return self.place.name

    def bytes_before(self, offset: int) -> int:
        """Bytes of the file that come before an offset, which counts rows where `rows` is known.

        Where it is compressed, how many is not known before its end: 0.
        """
        if self.rows is not None:
            return round(self.version.size_bytes * offset / self.rows)
        return 0 if compression_of(self.place.path) else offset

    def opened(self, offset: int = 0) -> BinaryIO:
        """The file, decompressed, to be read from an offset in bytes.

        Raises:
            InputError, OSError: as `Place.opened`; the compressed data are damaged.
        """
        stream = self.place.opened()
        compression = compression_of(self.place.path)
        if compression is None:
            stream.seek(offset)
            return stream
        decompressed = io.BufferedReader(pa.CompressedInputStream(stream, compression), _BUFFER_BYTES)
        while offset and (block := decompressed.read(min(offset, _BUFFER_BYTES))):
            offset -= len(block)
        return decompressed


def format_of(path: str) -> RowFormat | None:
    """What the ending of a name tells, of ``a.jsonl.gz`` that before the compression's; None where it is unknown."""
    name = PurePosixPath(path.lower())
    if name.suffix in _COMPRESSIONS:
        inner = _ENDINGS.get(PurePosixPath(name.stem).suffix)
        return None if inner is RowFormat.PARQUET else inner
    return _ENDINGS.get(name.suffix)


def compression_of(path: str) -> str | None:
    """Arrow's name of the compression that the ending of a name tells; None for none."""
    return _COMPRESSIONS.get(PurePosixPath(path.lower()).suffix)
