"""The figures of a case that charts show, one a chart."""

from __future__ import annotations

__all__ = ["FIGURES", "Figure", "describe"]

from collections.abc import Callable
from dataclasses import dataclass

from hdexport.bench.results.figure_text import bytes_text, case_state, error_text, fraction_text, ms_text, number_text
from hdexport.bench.results.result import BenchResult, CaseResult, Status


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a chart shows.

    Attributes:
        key: in names of files and ids.
        title: above the chart.
        axis: of the y axis, with the unit.
        value: of a case, in the axis' unit; None where it has no such figure, infinity where there is no number for it.
        high: the end of a whisker; None where charts have none.
        text: of a case, its value in words.
        details: of a case, label -> exact value, shown while the mouse is over its point.
        is_log: whether the axis is logarithmic.
        fails_high: whether a case that failed belongs where the large values are.
        tick_format: d3's, of the y axis.
    """

    key: str
    title: str
    axis: str
    value: Callable[[CaseResult], float | None]
    text: Callable[[CaseResult], str]
    details: Callable[[CaseResult], dict[str, str]]
    high: Callable[[CaseResult], float | None] | None = None
    is_log: bool = True
    fails_high: bool = True
    tick_format: str = ",~r"


def describe(result: BenchResult, figure: Figure, batch: int) -> str:
    """A chart in words, for those who do not see it."""
    parts = [_described(result, figure, batch, series.name) for series in result.series]
    return f"{figure.title}, batch {batch}, over tokens. {'; '.join(filter(None, parts))}."


def _described(result: BenchResult, figure: Figure, batch: int, series: str) -> str:
    cases = [case for case in result.cases if case.series == series and case.batch == batch]
    shown = [case for case in cases if figure.value(case) is not None]
    ends = [f"{figure.text(case)} at {case.tokens} tokens" for case in shown[:1] + shown[1:][-1:]]
    others = [f"{case_state(case)} at {case.tokens}" for case in cases if case_state(case) != Status.OK.value]
    said = ", ".join(filter(None, [" to ".join(ends), *others]))
    return f"{series}: {said}" if said else ""


def _p50_ms(case: CaseResult) -> float | None:
    return None if case.latency is None else case.latency.p50_ms


def _p95_ms(case: CaseResult) -> float | None:
    return None if case.latency is None else case.latency.p95_ms


def _peak_mb(case: CaseResult) -> float | None:
    peak_bytes = None if case.memory is None else case.memory.peak_bytes
    return None if peak_bytes is None else peak_bytes / 1e6


def _growth_mb(case: CaseResult) -> float | None:
    # Beside the memory of a GPU, the host's says little of the batch.
    if case.memory is None or case.memory.growth_bytes is None or case.memory.vram_bytes is not None:
        return None
    return case.memory.growth_bytes / 1e6


def _max_abs_error(case: CaseResult) -> float | None:
    if case.error is None:
        return None
    return float("inf") if case.error.max_abs_error is None else case.error.max_abs_error


def _fraction(case: CaseResult) -> float | None:
    return None if case.roofline is None else case.roofline.fraction


def _latency_details(case: CaseResult) -> dict[str, str]:
    latency = case.latency
    if latency is None:
        return {}
    return {
        "p50": f"{latency.p50_ms:.6g} ms",
        "p95": f"{latency.p95_ms:.6g} ms",
        "p99": f"{latency.p99_ms:.6g} ms",
        "mean": f"{latency.mean_ms:.6g} ms, sd {latency.sd_ms:.3g} ms",
        "runs": f"{latency.runs} in {len(latency.rounds_p50_ms)} rounds",
    }


def _memory_details(case: CaseResult) -> dict[str, str]:
    memory = case.memory
    if memory is None:
        return {}
    figures = {
        "GPU memory": memory.vram_bytes,
        "torch's allocator": memory.allocator_bytes,
        "TensorRT": memory.engine_bytes,
        "resident": memory.rss_bytes,
        "added by the batch": memory.growth_bytes,
    }
    return {name: f"{value / 1e6:,.1f} MB" for name, value in figures.items() if value is not None}


def _error_details(case: CaseResult) -> dict[str, str]:
    error = case.error
    if error is None:
        return {}
    largest = "not finite" if error.max_abs_error is None else f"{error.max_abs_error:.6g}"
    return {"max abs error": largest, "least cosine": f"{error.min_cosine:.9g}", "tolerance": error.tolerance}


def _roofline_details(case: CaseResult) -> dict[str, str]:
    roofline = case.roofline
    if roofline is None:
        return {}
    return {
        "reached": f"{roofline.fraction:.2%}",
        "bound": f"{roofline.bound_ms:.6g} ms",
        "operations": f"{roofline.flops / 1e9:,.1f} GFLOP ({roofline.dense_flops / 1e9:,.1f} if dense)",
        "bytes at least": f"{roofline.moved_bytes / 1e6:,.1f} MB",
    }


FIGURES = (
    Figure(
        key="latency",
        title="Latency: median, whisker to p95",
        axis="milliseconds a batch",
        value=_p50_ms,
        high=_p95_ms,
        text=lambda case: ms_text(_p50_ms(case) or 0.0),
        details=_latency_details,
    ),
    Figure(
        key="throughput",
        title="Tokens per second",
        axis="tokens/s",
        value=lambda case: case.tokens_per_s,
        text=lambda case: f"{number_text(case.tokens_per_s or 0.0)} tokens/s",
        details=lambda case: {"tokens/s": f"{case.tokens_per_s or 0.0:,.1f}"},
        fails_high=False,
        tick_format="~s",
    ),
    Figure(
        key="memory",
        title="Peak memory of the process",
        axis="MB",
        value=_peak_mb,
        text=lambda case: bytes_text(round((_peak_mb(case) or 0.0) * 1e6)),
        details=_memory_details,
    ),
    Figure(
        key="growth",
        title="Memory that the batch added",
        axis="MB",
        value=_growth_mb,
        text=lambda case: bytes_text(round((_growth_mb(case) or 0.0) * 1e6)),
        details=_memory_details,
    ),
    Figure(
        key="error",
        title="Largest error against PyTorch in float32",
        axis="max abs error",
        value=_max_abs_error,
        text=lambda case: error_text(case.error),
        details=_error_details,
        tick_format=".0e",
    ),
    Figure(
        key="roofline",
        title="Fraction of the roofline reached",
        axis="of the machine's measured limit",
        value=_fraction,
        text=lambda case: fraction_text(_fraction(case) or 0.0),
        details=_roofline_details,
        is_log=False,
        fails_high=False,
        tick_format=".0%",
    ),
)
"""In the order of the page."""
