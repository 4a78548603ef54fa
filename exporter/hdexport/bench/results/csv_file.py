"""`bench.csv`: one row per case, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hdexport.bench.results.result import BenchResult, CaseResult, Series
from hdruntime.whole_files import write_whole

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
"""Names of the columns, in order; a column is empty for a case without its figure."""

_UNAVAILABLE = "unavailable"
"""Value of the column ``status`` for a series that could not run; its ``batch`` and ``tokens`` are empty."""


def write_csv(path: Path, result: BenchResult) -> None:
    """Write one row per case and one per series that could not run, in the order of the series; the file appears whole.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for series in result.series:
        if series.unavailable is not None:
            table.writerow({**_of_series(series), "status": _UNAVAILABLE, "reason": series.unavailable})
        table.writerows(_row(result, series, case) for case in result.cases if case.series == series.name)
    write_whole(path, text.getvalue())


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
