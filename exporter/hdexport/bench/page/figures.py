"""The figures of a case that charts show, one per chart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hdexport.bench.results.result import BenchResult, CaseResult, Latency, OutputError, PeakMemory, Roofline, Status
from hdexport.bench.results.words import bytes_text, case_state, columns_of


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a case, which a chart shows.

    Attributes:
        key: in names of files and ids.
        axis: title of the y axis, with the unit.
        part: the field of a case that the figure belongs to.
        value: of a case, in the axis' unit; None without such a figure, infinity where it is not finite.
        high: the end of a case's whisker; None for a figure without whiskers.
        fails_high: whether failed cases stand at the end of large values.
        tick_format: d3's format of the y axis.
    """

    key: str
    title: str
    axis: str
    part: str
    value: Callable[[CaseResult], float | None]
    text: Callable[[CaseResult], str]
    high: Callable[[CaseResult], float | None] | None = None
    is_log: bool = True
    fails_high: bool = True
    tick_format: str = ",~r"

    def details(self, case: CaseResult) -> dict[str, str]:
        """Label -> exact value, shown while the mouse is over the case's point."""
        part = getattr(case, self.part)
        return {} if part is None else _TEXTS[self.part](part)


def describe(result: BenchResult, figure: Figure, batch: int) -> str:
    """A chart in words, for readers who do not see it."""
    parts = [_described(result, figure, batch, series.name) for series in result.series]
    return f"{figure.title}, batch {batch}, over tokens. {'; '.join(filter(None, parts))}."


def _described(result: BenchResult, figure: Figure, batch: int, series: str) -> str:
    cases = [case for case in result.cases if case.series == series and case.batch == batch]
    shown = [case for case in cases if figure.value(case) is not None]
    ends = [f"{figure.text(case)} at {case.tokens} tokens" for case in shown[:1] + shown[1:][-1:]]
    others = [f"{case_state(case)} at {case.tokens}" for case in cases if case_state(case) != Status.OK.value]
    said = ", ".join(filter(None, [" to ".join(ends), *others]))
    return f"{series}: {said}" if said else ""


def _figure(part: str, field: str, *, unit: float = 1.0) -> Callable[[CaseResult], float | None]:
    """A field of a part of a case, in units of the axis."""

    def value(case: CaseResult) -> float | None:
        found = getattr(getattr(case, part), field, None)
        return None if found is None else found / unit

    return value


def _growth_mb(case: CaseResult) -> float | None:
    # On a GPU, the host's memory says little about the batch.
    if case.memory is None or case.memory.growth_bytes is None or case.memory.vram_bytes is not None:
        return None
    return case.memory.growth_bytes / 1e6


def _latency_texts(latency: Latency) -> dict[str, str]:
    return {
        "p50": f"{latency.p50_ms:.6g} ms",
        "p95": f"{latency.p95_ms:.6g} ms",
        "p99": f"{latency.p99_ms:.6g} ms",
        "mean": f"{latency.mean_ms:.6g} ms, sd {latency.sd_ms:.3g} ms",
        "runs": f"{latency.runs} in {len(latency.rounds_p50_ms)} rounds",
    }


def _memory_texts(memory: PeakMemory) -> dict[str, str]:
    figures = {
        "GPU memory": memory.vram_bytes,
        "torch's allocator": memory.allocator_bytes,
        "engine": memory.engine_bytes,
        "resident": memory.rss_bytes,
        "added by the batch": memory.growth_bytes,
    }
    return {name: f"{value / 1e6:,.1f} MB" for name, value in figures.items() if value is not None}


def _error_texts(error: OutputError) -> dict[str, str]:
    largest = "not finite" if error.max_abs_error is None else f"{error.max_abs_error:.6g}"
    return {"max abs error": largest, "least cosine": f"{error.min_cosine:.9g}", "tolerance": error.tolerance}


def _roofline_texts(roofline: Roofline) -> dict[str, str]:
    return {
        "reached": f"{roofline.fraction:.2%}",
        "bound": f"{roofline.bound_ms:.6g} ms",
        "operations": f"{roofline.flops / 1e9:,.1f} GFLOP ({roofline.dense_flops / 1e9:,.1f} if dense)",
        "bytes at least": f"{roofline.moved_bytes / 1e6:,.1f} MB",
    }


_TEXTS: dict[str, Callable[[Any], dict[str, str]]] = {
    "latency": _latency_texts,
    "tokens_per_s": lambda tokens_per_s: {"tokens/s": f"{tokens_per_s:,.1f}"},
    "memory": _memory_texts,
    "error": _error_texts,
    "roofline": _roofline_texts,
}
_CELLS = columns_of()

FIGURES = (
    Figure(
        key="latency", title="Latency: median, whisker to p95", axis="milliseconds per batch", part="latency",
        value=_figure("latency", "p50_ms"), high=_figure("latency", "p95_ms"),
        text=lambda case: f"{_CELLS['p50'].text(case)} ms",
    ),
    Figure(
        key="throughput", title="Tokens per second", axis="tokens/s", part="tokens_per_s",
        value=lambda case: case.tokens_per_s, text=lambda case: f"{_CELLS['tokens/s'].text(case)} tokens/s",
        fails_high=False, tick_format="~s",
    ),
    Figure(
        key="memory", title="Peak memory of the process", axis="MB", part="memory",
        value=_figure("memory", "peak_bytes", unit=1e6), text=_CELLS["memory"].text,
    ),
    Figure(
        key="growth", title="Memory that the batch added", axis="MB", part="memory",
        value=_growth_mb, text=lambda case: bytes_text(round((_growth_mb(case) or 0.0) * 1e6)),
    ),
    Figure(
        key="error", title="Largest error against PyTorch in float32", axis="max abs error", part="error",
        value=_figure("error", "size"), text=_CELLS["error"].text, tick_format=".0e",
    ),
    Figure(
        key="roofline", title="Fraction of the roofline reached", axis="of the machine's measured limit",
        part="roofline", value=_figure("roofline", "fraction"), text=_CELLS["roofline"].text,
        is_log=False, fails_high=False, tick_format=".0%",
    ),
)  # fmt: skip
"""The figures, in the order of the page."""
