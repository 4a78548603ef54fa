"""bench.json, which is read with every value checked, and bench.csv."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from hdexport.bench.results.result import SCHEMA_VERSION, BenchResult, CaseResult, Series
from hdruntime.bundle.checked_json import JsonMismatchError, from_json, json_from_dataclass
from hdruntime.errors import InputError
from hdruntime.os_errors import explained
from hdruntime.whole_files import read_bounded, write_whole

JSON_FILE = "bench.json"

_MOST_BYTES = 2**30

_MEASURE_AGAIN = "measure again with: hdexport bench BUNDLE -o DIR"

CSV_FILE = "bench.csv"

_LATENCY = ("p50_ms", "p95_ms", "p99_ms", "mean_ms", "sd_ms", "min_ms", "max_ms", "runs", "is_stable")

_MEMORY = ("rss_bytes", "growth_bytes", "vram_bytes", "allocator_bytes", "engine_bytes", "vram_is_of_device")

_ERROR = ("max_abs_error", "min_cosine", "passed", "tolerance")

_ROOFLINE = ("flops", "dense_flops", "moved_bytes", "bound_ms", "fraction")

COLUMNS = (
    *("series", "runner", "bundle", "is_peer", "batch", "tokens", "status", "reason"),
    *_LATENCY,
    *("ratio_to_first", "tokens_per_s", "precision"),
    *_MEMORY,
    *_ERROR,
    *_ROOFLINE,
)
"""Columns of ``bench.csv`` in order; a column is empty for a case without that figure."""

_UNAVAILABLE = "unavailable"
"""Value of the column ``status`` for a series that could not run; its ``batch`` and ``tokens`` are empty."""


def write_result(path: Path, result: BenchResult) -> None:
    """Writes a benchmark's result as JSON, whole or not at all. A figure that is NaN or infinite is a ValueError."""
    write_whole(path, json_from_dataclass(result))


def read_result(path: Path) -> BenchResult:
    """Reads the file of `write_result`, or ``bench.json`` of a folder; unknown keys are ignored. A file that is
    missing, damaged or from a newer hdexport is an InputError that names the key."""
    path = path / JSON_FILE if path.is_dir() else path
    text = _text(path)
    try:
        # The version comes first: a newer schema may have other keys.
        version = from_json(text, _AnySchema, name="bench").schema_version
    except ValueError as error:
        raise InputError(
            f"{path} is not a result of hdexport bench: {error}.\nGive a {JSON_FILE} or its folder, or {_MEASURE_AGAIN}"
        ) from None
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


def write_csv(path: Path, result: BenchResult) -> None:
    """Writes one row per case, and one per series that could not run, in the order of the series."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for series in result.series:
        if series.unavailable is not None:
            table.writerow({**_of_series(series), "status": _UNAVAILABLE, "reason": series.unavailable})
        table.writerows(_row(result, series, case) for case in result.cases if case.series == series.name)
    write_whole(path, text.getvalue())


@dataclass(frozen=True, kw_only=True)
class _AnySchema:
    """Keys of a result of every version."""

    schema_version: int
    cases: list[object]


def _text(path: Path) -> bytes:
    try:
        return read_bounded(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise InputError(f"There is no {path}.\nGive a {JSON_FILE} or its folder, or {_MEASURE_AGAIN}") from None
    except OSError as error:
        other = f"Give a {JSON_FILE} or its folder, or {_MEASURE_AGAIN}"
        raise InputError(f"{path} cannot be read: {explained(error, otherwise=other)}") from error


def _require_known_series(path: Path, result: BenchResult) -> None:
    names = [series.name for series in result.series]
    for index, case in enumerate(result.cases):
        if case.series not in names:
            raise InputError(
                f"{path}: bench.cases[{index}].series is {case.series!r}, which bench.series does not list.\n"
                f"Copy the file again, or {_MEASURE_AGAIN}"
            )


def _row(result: BenchResult, series: Series, case: CaseResult) -> dict[str, object]:
    ratio = result.ratio_to_first(case)
    return {
        **_of_series(series),
        "batch": case.batch,
        "tokens": case.tokens,
        "status": case.status.value,
        "reason": case.reason,
        "ratio_to_first": None if ratio is None else ratio.value,
        "tokens_per_s": case.tokens_per_s,
        "precision": case.precision,
        **_figures(case.latency, _LATENCY),
        **_figures(case.memory, _MEMORY),
        **_figures(case.error, _ERROR),
        **_figures(case.roofline, _ROOFLINE),
    }


def _of_series(series: Series) -> dict[str, object]:
    return {"series": series.name, "runner": series.runner, "bundle": series.bundle, "is_peer": series.is_peer}


def _figures(part: object | None, names: tuple[str, ...]) -> dict[str, object]:
    return {} if part is None else {name: getattr(part, name) for name in names}
