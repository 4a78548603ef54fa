"""Read and write `bench.json`; every value is checked when the file is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hdexport.bench.results.result import SCHEMA_VERSION, BenchResult
from hdruntime.bundle.checked_json import JsonMismatchError, from_json, json_from_dataclass
from hdruntime.errors import InputError
from hdruntime.os_errors import explained
from hdruntime.whole_files import read_bounded, write_whole

JSON_FILE = "bench.json"

_MOST_BYTES = 2**30

_MEASURE_AGAIN = "measure again with: hdexport bench BUNDLE -o DIR"


def write_result(path: Path, result: BenchResult) -> None:
    """Write a benchmark's result as JSON, atomically. A figure that is NaN or infinite raises ValueError."""
    write_whole(path, json_from_dataclass(result))


def read_result(path: Path) -> BenchResult:
    """Read the file of `write_result`, or ``bench.json`` in a directory; unknown keys are ignored.

    A file that is missing, damaged or of another schema version raises InputError.
    """
    path = path / JSON_FILE if path.is_dir() else path
    text = _text(path)
    try:
        # The version comes first: a newer schema may have other keys.
        version = from_json(text, _AnySchema, name="bench").schema_version
    except ValueError as error:
        raise InputError(
            f"{path} is not a result of hdexport bench: {error}.",
            hint=f"Give a {JSON_FILE} or its directory, or {_MEASURE_AGAIN}",
        ) from None
    if version != SCHEMA_VERSION:
        hint = "update hdexport" if version > SCHEMA_VERSION else _MEASURE_AGAIN
        raise InputError(
            f"{path} has schema version {version}; this hdexport reads version {SCHEMA_VERSION}.",
            hint=f"{hint[0].upper()}{hint[1:]}.",
        )
    try:
        result = from_json(text, BenchResult, name="bench")
    except JsonMismatchError as error:
        raise InputError(f"{path}: {error}.", hint=f"Copy the file again, or {_MEASURE_AGAIN}") from None
    _require_known_series(path, result)
    return result


@dataclass(frozen=True, kw_only=True)
class _AnySchema:
    """Keys that a result of every schema version has."""

    schema_version: int
    cases: list[object]


def _text(path: Path) -> bytes:
    try:
        return read_bounded(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise InputError(
            f"There is no {path}.", hint=f"Give a {JSON_FILE} or its directory, or {_MEASURE_AGAIN}"
        ) from None
    except OSError as error:
        other = f"Give a {JSON_FILE} or its folder, or {_MEASURE_AGAIN}"
        raise InputError(f"{path} cannot be read: {explained(error, otherwise=other)}") from error


def _require_known_series(path: Path, result: BenchResult) -> None:
    names = [series.name for series in result.series]
    for index, case in enumerate(result.cases):
        if case.series not in names:
            raise InputError(
                f"{path}: bench.cases[{index}].series is {case.series!r}, which bench.series does not list.",
                hint=f"Copy the file again, or {_MEASURE_AGAIN}",
            )
