"""Figures of a case that charts show, one figure per chart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hdexport.bench.results.result import CaseResult


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a case, shown by a chart.

    Attributes:
        key: name in files and ids.
        axis: title of the y axis, with the unit.
        value: value of a case in the unit of the axis; None without the figure, infinity if it is not finite.
        high: end of a case's whisker; None for a figure without whiskers.
        fails_high: whether failed cases are drawn at the end of large values.
        tick_format: d3 format of the y axis.
    """

    key: str
    title: str
    axis: str
    value: Callable[[CaseResult], float | None]
    high: Callable[[CaseResult], float | None] | None = None
    fails_high: bool = True
    tick_format: str = ",~r"


def _figure(part: str, field: str, *, unit: float = 1.0) -> Callable[[CaseResult], float | None]:
    def value(case: CaseResult) -> float | None:
        number = getattr(getattr(case, part), field, None)
        return None if number is None else number / unit

    return value


def _growth_mb(case: CaseResult) -> float | None:
    # On a GPU, the host's memory says little about the batch.
    if case.memory is None or case.memory.growth_bytes is None or case.memory.vram_bytes is not None:
        return None
    return case.memory.growth_bytes / 1e6


FIGURES = (
    Figure(
        key="latency", title="Latency: median, whisker to p95", axis="milliseconds per batch",
        value=_figure("latency", "p50_ms"), high=_figure("latency", "p95_ms"),
    ),
    Figure(
        key="throughput", title="Throughput", axis="tokens per second", value=lambda case: case.tokens_per_s,
        fails_high=False, tick_format="~s",
    ),
    Figure(key="memory", title="Peak memory", axis="MB", value=_figure("memory", "peak_bytes", unit=1e6)),
    Figure(key="growth", title="Memory added by the batch", axis="MB", value=_growth_mb),
    Figure(
        key="error", title="Largest difference from PyTorch in float32", axis="max abs error",
        value=_figure("error", "size"), tick_format=".0e",
    ),
)  # fmt: skip
"""Figures in the order of the page."""
