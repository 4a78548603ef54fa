"""`bench.json`: the result of a benchmark, written whole and read with every value checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hdexport.bench.results.result import SCHEMA_VERSION, BenchResult
from hdruntime.bundle.checked_json import JsonMismatchError, from_json, json_from_dataclass
from hdruntime.errors import InputError
from hdruntime.whole_files import write_whole

JSON_FILE = "bench.json"


def write_result(path: Path, result: BenchResult) -> None:
    """Write a benchmark's result; an existing one is replaced as a whole, or stays.

    Raises:
        ValueError: a figure is NaN or infinite, which JSON cannot hold.
        OSError: the file cannot be written.
    """
    write_whole(path, json_from_dataclass(result))


def read_result(path: Path) -> BenchResult:
    """Read the file of `write_result`; keys that this version does not know are ignored.

    Args:
        path: the file, or the folder that holds it as `bench.json`.

    Raises:
        InputError: the file is missing, invalid, damaged, or of a newer hdexport; the message names the key.
    """
    path = path / JSON_FILE if path.is_dir() else path
    text = _text(path)
    try:
        # The version comes first: a newer schema may have other keys.
        version = from_json(text, _AnySchema, name="bench").schema_version
    except ValueError as error:
        raise _no_result(path, str(error)) from None
    if version > SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema version {version}; this hdexport reads up to {SCHEMA_VERSION}.\n"
            "Update it with: pip install -U hdexport"
        )
    try:
        result = from_json(text, BenchResult, name="bench")
    except JsonMismatchError as error:
        raise InputError(f"{path}: {error}.\nCopy the file again, or {_MEASURE_AGAIN}") from None
    _require_known_series(path, result)
    return result


_MEASURE_AGAIN = "measure again with: hdexport bench BUNDLE -o DIR"


@dataclass(frozen=True, kw_only=True)
class _AnySchema:
    """The keys of a result of any version."""

    schema_version: int
    cases: list[object]


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"There is no {path}.\nGive a {JSON_FILE} or its folder, or {_MEASURE_AGAIN}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.\nCheck its permissions.") from error


def _no_result(path: Path, reason: str) -> InputError:
    return InputError(
        f"{path} is not a result of hdexport bench: {reason}.\nGive a {JSON_FILE} or its folder, or {_MEASURE_AGAIN}"
    )


def _require_known_series(path: Path, result: BenchResult) -> None:
    names = [series.name for series in result.series]
    for index, case in enumerate(result.cases):
        if case.series not in names:
            raise InputError(
                f"{path}: bench.cases[{index}].series is {case.series!r}, which bench.series does not list.\n"
                f"Copy the file again, or {_MEASURE_AGAIN}"
            )
