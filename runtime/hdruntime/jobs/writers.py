"""Results of a batch job as bytes that can be appended to, and the file that they become."""

from __future__ import annotations

__all__ = ["STDOUT", "ResultEncoding", "check_output", "encoding_of_output", "result_format"]

import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from hdruntime.errors import InputError, OutputExistsError
from hdruntime.jobs.arrow_results import ParquetResults, Results, json_from_value
from hdruntime.jobs.files import OpenFolder
from hdruntime.jobs.matrix_files import NpyResults, NpzResults
from hdruntime.jobs.places import special_kind

STDOUT = Path("-")
"""Stands for the standard output, on which results are JSON Lines."""


class ResultFormat(str, Enum):
    """How a file holds results; told by the ending of its name, which is the value."""

    JSONL = ".jsonl"
    PARQUET = ".parquet"
    NPY = ".npy"
    NPZ = ".npz"

    @property
    def is_matrix(self) -> bool:
        """Whether it holds nothing but vectors and what there is one number of per row."""
        return self in (ResultFormat.NPY, ResultFormat.NPZ)


_ENDINGS = ".jsonl, .parquet, .npy or .npz"


class ResultEncoding(Protocol):
    """How results are kept while the job runs: bytes to which more can be appended after any call of `encode`."""

    def begin(self) -> bytes:
        """What comes before all rows."""

    def encode(self, rows: Results) -> bytes:
        """Some rows, each a value for every column, None for no value."""

    def finish(self, folder: OpenFolder, encoded: str, finished: str, *, metadata: Mapping[str, str]) -> None:
        """Make the output of all that was encoded: it appears whole, and stays. `encoded` may be gone then.

        Args:
            folder: where both are.
            encoded: on the disk.
            finished: what it shall be.
            metadata: about the results, where the format has a place for it.
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
            f"Name a file that ends in {_ENDINGS} with -o, or - for the standard output."
        )
    result_format(output)
    if output.is_dir():
        raise OutputExistsError(f"{output} is a directory.\nName a file with -o.")
    if os.path.lexists(output) and not force:
        raise OutputExistsError(f"{output} exists.\nReplace it with --force, or choose another place with -o.")
    if not output.parent.is_dir():
        raise InputError(f"There is no directory {output.parent} for the output.\nMake it: mkdir -p {output.parent}")


def result_format(output: Path) -> ResultFormat:
    """What the output's ending tells.

    Raises:
        InputError: it is no format's.
    """
    if output == STDOUT:
        return ResultFormat.JSONL
    try:
        return ResultFormat(output.suffix.lower())
    except ValueError:
        raise InputError(
            f"{output} has no known format: its name ends in {output.suffix or 'nothing'!r}.\n"
            f"Outputs end in {_ENDINGS}."
        ) from None


def encoding_of_output(output: Path, fields: Sequence[pa.Field]) -> ResultEncoding:
    """What suits the output's ending.

    Args:
        output: the file.
        fields: its columns.

    Raises:
        InputError: the ending is no format's.
    """
    schema = pa.schema(list(fields))
    match result_format(output):
        case ResultFormat.PARQUET:
            return ParquetResults(schema)
        case ResultFormat.NPY:
            return NpyResults(schema)
        case ResultFormat.NPZ:
            return NpzResults(schema)
    return _JsonLines(schema.names)


class _JsonLines:
    """Lines are kept as they will be.

    Args:
        names: of the columns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._members = [(name, f"{json.dumps(name)}: ") for name in names]

    def begin(self) -> bytes:
        return b""

    def encode(self, rows: Results) -> bytes:
        return "".join(map(self._line, rows)).encode()

    def finish(self, folder: OpenFolder, encoded: str, finished: str, *, metadata: Mapping[str, str]) -> None:
        folder.rename(encoded, finished)

    def _line(self, row: Mapping[str, object]) -> str:
        return f"{{{', '.join([key + json_from_value(row[name]) for name, key in self._members])}}}\n"
