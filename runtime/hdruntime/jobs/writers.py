"""Results of a batch job as bytes that can be appended to, and the JSON Lines or Parquet file that they become."""

from __future__ import annotations

__all__ = ["ResultEncoding", "ResultFormat", "check_output", "encoding_of_output"]

import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hdruntime.errors import InputError, OutputExistsError
from hdruntime.jobs.files import OpenFolder
from hdruntime.jobs.regular_files import special_kind

_GROUP_ROWS = 4096
"""Rows of a Parquet row group. Readers like large ones; each one's writer holds it in memory."""

_GROUP_BYTES = 64 * 2**20
"""A row group is written when its columns reach this, however few its rows."""

Results = Sequence[Mapping[str, object]]


class ResultFormat(str, Enum):
    """How a file holds results; told by the ending of its name, which is the value."""

    JSONL = ".jsonl"
    PARQUET = ".parquet"


class ResultEncoding(Protocol):
    """How results are kept while the job runs: bytes to which more can be appended after any call of `encode`."""

    def begin(self) -> bytes:
        """What comes before all rows."""

    def encode(self, rows: Results) -> bytes:
        """Some rows, each a value for every column, None for no value."""

    def finish(self, folder: OpenFolder, encoded: str, finished: str) -> None:
        """Make the output of all that was encoded: it appears whole, and stays. `encoded` may be gone then.

        Args:
            folder: where both are.
            encoded: on the disk.
            finished: what it shall be.
        """


def check_output(output: Path, *, force: bool) -> None:
    """Refuse a place that results cannot be written to.

    Raises:
        InputError: the name's ending is no format's, or there is no such directory, or it is a device or a pipe.
        OutputExistsError: something is there, and it may not be replaced.
    """
    # Through links: a job moves its output to where they end, into the place of a device, too.
    kind = special_kind(output.stat()) if output.exists() else None
    if kind is not None:
        raise InputError(
            f"{output} is {kind}; an output is a file, which appears when it is complete.\n"
            "Name a file that ends in .jsonl or .parquet with -o."
        )
    _format_of(output)
    if output.is_dir():
        raise OutputExistsError(f"{output} is a directory.\nName a file with -o.")
    if os.path.lexists(output) and not force:
        raise OutputExistsError(f"{output} exists.\nReplace it with --force, or choose another place with -o.")
    if not output.parent.is_dir():
        raise InputError(f"There is no directory {output.parent} for the output.\nMake it: mkdir -p {output.parent}")


def encoding_of_output(output: Path, fields: Sequence[pa.Field]) -> ResultEncoding:
    """What suits the output's ending.

    Args:
        output: the file.
        fields: its columns.

    Raises:
        InputError: the ending is no format's.
    """
    return _JsonLines() if _format_of(output) is ResultFormat.JSONL else _Parquet(pa.schema(list(fields)))


def _format_of(output: Path) -> ResultFormat:
    try:
        return ResultFormat(output.suffix.lower())
    except ValueError:
        endings = " or ".join(kind.value for kind in ResultFormat)
        raise InputError(
            f"{output} is of no kind that can be written: its name ends in {output.suffix or 'nothing'!r}.\n"
            f"Outputs end in {endings}."
        ) from None


class _JsonLines:
    """Lines are kept as they will be."""

    def begin(self) -> bytes:
        return b""

    def encode(self, rows: Results) -> bytes:
        return "".join(map(_line_from_row, rows)).encode()

    def finish(self, folder: OpenFolder, encoded: str, finished: str) -> None:
        folder.rename(encoded, finished)


def _line_from_row(row: Mapping[str, object]) -> str:
    members = (f"{json.dumps(name)}: {_json_from_value(value)}" for name, value in row.items())
    return f"{{{', '.join(members)}}}\n"


def _json_from_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        # Nine digits are what it takes to read back the same float32; json would write up to seventeen.
        return f"[{', '.join(f'{number:.9g}' for number in value.tolist())}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class _Parquet:
    """A Parquet file ends with its table of contents, so nothing can be added to one; kept are Arrow record batches.

    Args:
        schema: of the output.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def begin(self) -> bytes:
        return bytes(self._schema.serialize())

    def encode(self, rows: Results) -> bytes:
        columns = [pa.array(_cells(rows, field), type=field.type) for field in self._schema]
        return bytes(pa.RecordBatch.from_arrays(columns, schema=self._schema).serialize())

    def finish(self, folder: OpenFolder, encoded: str, finished: str) -> None:
        with open(folder.open(encoded, os.O_RDONLY), "rb") as source, folder.replacing(finished) as file:
            self._write_groups(source, file)

    def _write_groups(self, source: BinaryIO, file: BinaryIO) -> None:
        with (
            pa.ipc.open_stream(source) as batches,
            pa.parquet.ParquetWriter(file, self._schema) as writer,
        ):
            held: list[pa.RecordBatch] = []
            for batch in batches:
                held.append(batch)
                if sum(len(part) for part in held) >= _GROUP_ROWS or sum(part.nbytes for part in held) >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held))
                    held = []
            if held:
                writer.write_table(pa.Table.from_batches(held))


def _cells(rows: Results, field: pa.Field) -> list[object]:
    cells = [row[field.name] for row in rows]
    if pa.types.is_string(field.type):
        # Ids may be strings here and integers there; a Parquet column has one type.
        return [None if cell is None else str(cell) for cell in cells]
    return cells
