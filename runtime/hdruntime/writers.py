"""Results of a batch job as JSON Lines or Parquet, in a file that appears whole or not at all."""

from __future__ import annotations

__all__ = ["ResultFormat", "ResultWriter", "check_output", "staged_results"]

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hdruntime.errors import HdexportError, InputError, OutputExistsError

_GROUP_ROWS = 4096
"""Rows of a Parquet row group. Readers like large ones; each one's writer holds it in memory."""

_GROUP_BYTES = 64 * 2**20
"""A row group is written when its columns reach this, however few its rows."""


class ResultFormat(str, Enum):
    """How a file holds results; told by the ending of its name, which is the value."""

    JSONL = ".jsonl"
    PARQUET = ".parquet"


class ResultWriter(Protocol):
    """Takes results row by row, a value for each column, and writes them in that order."""

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Take some rows; None stands for no value."""

    def finish(self) -> None:
        """Write what is still held."""

    def abandon(self) -> None:
        """Let go of the file, which will be removed."""


def check_output(output: Path, *, force: bool) -> None:
    """Refuse a place that results cannot be written to.

    Raises:
        InputError: the name's ending is no format's, or there is no such directory.
        OutputExistsError: something is there, and it may not be replaced.
    """
    _format_of(output)
    if output.is_dir():
        raise OutputExistsError(f"{output} is a directory.\nName a file with -o.")
    if os.path.lexists(output) and not force:
        raise OutputExistsError(f"{output} exists.\nReplace it with --force, or choose another place with -o.")
    if not output.parent.is_dir():
        raise InputError(f"There is no directory {output.parent} for the output.\nMake it: mkdir -p {output.parent}")


@contextlib.contextmanager
def staged_results(output: Path, *, fields: Sequence[pa.Field], force: bool) -> Iterator[ResultWriter]:
    """A writer into a temporary sibling that is renamed to `output` when the block ends cleanly.

    If the block raises, the temporary file is removed and what was at `output` stays. A link is followed.

    Args:
        output: the file; its ending chooses the format.
        fields: the columns.
        force: replace a file that is there.

    Raises:
        InputError, OutputExistsError: see `check_output`.
        HdexportError: the file cannot be written, for instance because the disk is full.
    """
    check_output(output, force=force)
    kind = _format_of(output)
    target = output.resolve()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            writer: ResultWriter = _JsonlWriter(file) if kind is ResultFormat.JSONL else _ParquetWriter(file, fields)
            try:
                yield writer
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
            file.flush()
            os.fsync(file.fileno())
        # Somebody else may have put a file there meanwhile.
        check_output(output, force=force)
        partial.replace(target)
    except OSError as error:
        raise HdexportError(
            f"{output} could not be written: {error.strerror or error}.\n"
            "Free some space there, or choose another place with -o."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _format_of(output: Path) -> ResultFormat:
    try:
        return ResultFormat(output.suffix.lower())
    except ValueError:
        endings = " or ".join(kind.value for kind in ResultFormat)
        raise InputError(
            f"{output} is of no kind that can be written: its name ends in {output.suffix or 'nothing'!r}.\n"
            f"Outputs end in {endings}."
        ) from None


class _JsonlWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        for row in rows:
            members = (f"{json.dumps(name)}: {_json_from_value(value)}" for name, value in row.items())
            self._file.write(f"{{{', '.join(members)}}}\n".encode())

    def finish(self) -> None:
        pass  # the file's own buffer is all there is

    def abandon(self) -> None:
        pass


def _json_from_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        # Nine digits are what it takes to read back the same float32; json would write up to seventeen.
        return f"[{', '.join(f'{number:.9g}' for number in value.tolist())}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class _ParquetWriter:
    def __init__(self, file: BinaryIO, fields: Sequence[pa.Field]) -> None:
        self._schema = pa.schema(list(fields))
        self._writer = pa.parquet.ParquetWriter(file, self._schema)
        self._held: list[pa.Table] = []

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        columns = [pa.array(_cells(rows, field), type=field.type) for field in self._schema]
        # Arrow's form at once: rows as Python objects would take several times the memory.
        self._held.append(pa.Table.from_arrays(columns, schema=self._schema))
        rows_held = sum(table.num_rows for table in self._held)
        if rows_held >= _GROUP_ROWS or sum(table.nbytes for table in self._held) >= _GROUP_BYTES:
            self._write_held()

    def finish(self) -> None:
        self._write_held()
        self._writer.close()

    def abandon(self) -> None:
        # Otherwise pyarrow closes it when it is collected, and complains that the file is gone.
        with contextlib.suppress(OSError):
            self._writer.close()

    def _write_held(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held))
            self._held = []


def _cells(rows: Sequence[Mapping[str, object]], field: pa.Field) -> list[object]:
    cells = [row[field.name] for row in rows]
    if pa.types.is_string(field.type):
        # Ids may be strings here and integers there; a Parquet column has one type.
        return [None if cell is None else str(cell) for cell in cells]
    return cells
