"""The figures of a case as cells of tables, on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hdexport.bench.results.figure_text import (
    bytes_text,
    cosine_text,
    error_text,
    number_text,
    ratio_text,
)
from hdexport.bench.results.result import BenchResult, CaseResult

LATENCIES = ("p50", "p95", "p99", "mean", "sd")
"""The columns in milliseconds."""

_MEMORY = {
    "GPU": "vram_bytes",
    "allocator": "allocator_bytes",
    "TensorRT": "engine_bytes",
    "resident": "rss_bytes",
    "added": "growth_bytes",
}
"""Column -> the field of `PeakMemory`."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure; its text is empty where a case has none."""

    name: str
    unit: str
    text: Callable[[CaseResult], str]


def columns_of(result: BenchResult | None = None) -> dict[str, Column]:
    """All figures by name, in the order of tables.

    Args:
        result: that ratios refer to; None leaves them out.
    """
    return {column.name: column for column in _columns(result)}


def _columns(result: BenchResult | None) -> Iterator[Column]:
    for name in LATENCIES:
        yield Column(name=name, unit="ms", text=_figure("latency", f"{name}_ms", number_text))
    if result is not None:
        yield Column(name="ratio", unit="to first", text=lambda case: ratio_text(result.ratio_to_first(case)))
    yield Column(
        name="tokens/s", unit="", text=lambda case: "" if case.tokens_per_s is None else number_text(case.tokens_per_s)
    )
    yield Column(name="memory", unit="", text=_figure("memory", "peak_bytes", bytes_text))
    for name, field in _MEMORY.items():
        yield Column(name=name, unit="MB", text=_figure("memory", field, lambda size: number_text(size / 1e6)))
    yield Column(name="error", unit="max abs", text=lambda case: error_text(case.error))
    yield Column(name="cosine", unit="least", text=lambda case: cosine_text(case.error))
    yield Column(name="roofline", unit="", text=_figure("roofline", "fraction", "{:.1%}".format))


def _figure(part: str, field: str, text: Callable[..., str]) -> Callable[[CaseResult], str]:
    def cell(case: CaseResult) -> str:
        value = getattr(getattr(case, part), field, None)
        return "" if value is None else text(value)

    return cell
