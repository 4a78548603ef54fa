"""Figures of a benchmark as text: numbers with units, the columns of tables, and what is known of the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hdexport.bench.results.result import BenchResult, CaseResult, CaseState, OutputError, Ratio

_DIGITS = 3
"""Minimum of significant digits of a figure; whole numbers keep all digits."""

_MIN_PLAIN_ERROR = 1e-3
"""Smaller errors are written with an exponent."""

_MEMORY = {
    "GPU": "vram_bytes",
    "allocator": "allocator_bytes",
    "engine": "engine_bytes",
    "resident": "rss_bytes",
    "added": "growth_bytes",
}
"""Column -> field of `PeakMemory`."""


def number_text(value: float) -> str:
    """Three significant digits, or the whole number: ``0.0213``, ``3.42``, ``34.2``, ``3,421``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def ms_text(value: float) -> str:
    return f"{number_text(value)} ms"


def bytes_text(value: int) -> str:
    """``412 MB`` or ``5.31 GB``, in powers of ten."""
    unit, name = (1e9, "GB") if value >= 1e9 else (1e6, "MB")
    return f"{number_text(value / unit)} {name}"


def error_text(error: OutputError | None) -> str:
    """Largest absolute difference: ``3.1e-6``, ``0.35``, ``0`` or ``not finite``; empty if nothing was compared."""
    if error is None:
        return ""
    if error.max_abs_error is None:
        return "not finite"
    if error.max_abs_error == 0 or error.max_abs_error >= _MIN_PLAIN_ERROR:
        return f"{error.max_abs_error:.2g}"
    digits, _, exponent = f"{error.max_abs_error:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def cosine_text(error: OutputError | None) -> str:
    """Smallest cosine, rounded down, so that only a cosine of 1 is written as 1."""
    if error is None or error.max_abs_error is None:
        return ""
    return f"{math.floor(error.min_cosine * 1e6) / 1e6:g}"


def outputs_text(case: CaseResult) -> str:
    """Sentence about outputs that exceed the tolerance; empty for outputs within it."""
    error = case.error
    if error is None or case.state not in (CaseState.DIFFERS, CaseState.WRONG):
        return ""
    cosine = cosine_text(error)
    size = f"max abs error {error_text(error)}" + (f", min cosine {cosine}" if cosine else "")
    if case.state is CaseState.DIFFERS:
        changes = " and ".join(change.value for change in error.missing_changes)
        return f"outputs differ by the requested change of {changes}: {size}"
    return f"outputs are wrong: {size}; tolerance: {error.tolerance}"


def ratio_text(ratio: Ratio | None) -> str:
    """Ratio of the medians: ``3.0x``."""
    return "" if ratio is None else f"{number_text(ratio.value)}x"


def range_text(ratio: Ratio | None) -> str:
    """Range of the rounds' ratios: ``2.9 to 3.1``."""
    return "" if ratio is None else f"{number_text(ratio.min)} to {number_text(ratio.max)}"


class Column(NamedTuple):
    """One figure of a case as a column of a table; `text` is empty for a case without the figure."""

    name: str
    unit: str
    text: Callable[[CaseResult], str]


def columns_of(result: BenchResult) -> dict[str, Column]:
    """Columns of all figures by name, in the order of tables."""
    return {column.name: column for column in _columns(result)}


def _columns(result: BenchResult) -> Iterator[Column]:
    for name in ("p50", "p95", "p99", "mean", "sd"):
        yield Column(name, "ms", _figure("latency", f"{name}_ms", number_text))
    yield Column("ratio", "", lambda case: ratio_text(result.ratio_to_first(case)))
    yield Column("tokens/s", "", lambda case: "" if case.tokens_per_s is None else number_text(case.tokens_per_s))
    yield Column("memory", "", _figure("memory", "peak_bytes", bytes_text))
    for name, field in _MEMORY.items():
        yield Column(name, "MB", _figure("memory", field, lambda size: number_text(size / 1e6)))
    yield Column("max error", "", lambda case: error_text(case.error))
    yield Column("min cosine", "", lambda case: cosine_text(case.error))
    yield Column("outputs", "", lambda case: "not compared" if case.error is None else case.state.value)


def _figure(part: str, field: str, text: Callable[..., str]) -> Callable[[CaseResult], str]:
    def cell(case: CaseResult) -> str:
        value = getattr(getattr(case, part), field, None)
        return "" if value is None else text(value)

    return cell
