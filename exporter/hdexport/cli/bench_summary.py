"""What a benchmark found, as tables for the terminal."""

from __future__ import annotations

__all__ = ["Column", "case_line", "cell_table", "short_columns", "summary_parts"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hdexport.bench.results.figure_text import (
    bytes_text,
    case_state,
    error_text,
    fraction_text,
    ms_text,
    number_text,
    ratio_text,
)
from hdexport.bench.results.findings import findings
from hdexport.bench.results.result import BenchResult, CaseResult, Latency

_WIDE = 118
"""Columns of the terminal from which all figures have room."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure of a case."""

    name: str
    text: Callable[[CaseResult], str]


def short_columns() -> list[Column]:
    """Of the figures that matter most."""
    return [_P50, _RATE, _MEMORY, _ERROR]


def case_line(case: CaseResult) -> str:
    """A case that is done, in one line."""
    where = f"{case.series}, {case.batch} x {case.tokens}"
    if case.latency is None:
        return f"{where}: {case.status.value}" + (f": {case.reason}" if case.reason else "")
    figures = [f"p50 {ms_text(case.latency.p50_ms)}", f"p95 {ms_text(case.latency.p95_ms)}"]
    figures += [f"{_rate(case)} tokens/s", _memory(case), f"error {error_text(case.error)}" if case.error else ""]
    figures += ["WRONG ANSWER"] if case_state(case) == "wrong" else []
    return f"{where}: {', '.join(filter(None, figures))}"


def cell_table(columns: Sequence[str], *, title: str | None = None) -> Table:
    """An empty table; the column ``series`` breaks its lines where there is no room, the others do not."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="dim")
    for name in columns:
        is_text = name in ("series", "stopped by")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def summary_parts(result: BenchResult, *, width: int) -> Iterator[RenderableType]:
    """The tables, one a batch size, the largest batches, and what did not run.

    Args:
        result: what was measured.
        width: of the terminal; a narrow one gets the figures that matter most.
    """
    columns = [_P50, _P95, *([_P99, _MEAN, _SD] if width >= _WIDE else []), _ratio(result), _RATE, _MEMORY, _ERROR]
    columns += [_ROOFLINE] if width >= _WIDE and any(case.roofline for case in result.cases) else []
    for batch in result.batches:
        yield _cases_table(result, batch, columns)
    if result.first_series is not None:
        yield Text(f"ratio: of the median latencies, to {result.first_series} in this run")
    if result.largest_batches:
        yield Text()
        yield _largest_batches(result)
    yield from map(Text, _remarks(result))


def _latency(name: str, value: Callable[[Latency], float]) -> Column:
    return Column(name=name, text=lambda case: "" if case.latency is None else number_text(value(case.latency)))


def _p50(case: CaseResult) -> str:
    return case.status.value if case.latency is None else number_text(case.latency.p50_ms)


def _rate(case: CaseResult) -> str:
    return "" if case.tokens_per_s is None else number_text(case.tokens_per_s)


def _memory(case: CaseResult) -> str:
    peak_bytes = None if case.memory is None else case.memory.peak_bytes
    return "" if peak_bytes is None else bytes_text(peak_bytes)


def _error(case: CaseResult) -> str:
    return f"{error_text(case.error)} wrong" if case_state(case) == "wrong" else error_text(case.error)


def _ratio(result: BenchResult) -> Column:
    return Column(name="ratio", text=lambda case: ratio_text(result.ratio_to_first(case)))


_P50 = Column(name="p50 ms", text=_p50)
_P95 = _latency("p95 ms", lambda latency: latency.p95_ms)
_P99 = _latency("p99 ms", lambda latency: latency.p99_ms)
_MEAN = _latency("mean ms", lambda latency: latency.mean_ms)
_SD = _latency("sd ms", lambda latency: latency.sd_ms)
_RATE = Column(name="tokens/s", text=_rate)
_MEMORY = Column(name="memory", text=_memory)
_ERROR = Column(name="error", text=_error)
_ROOFLINE = Column(
    name="roofline", text=lambda case: "" if case.roofline is None else fraction_text(case.roofline.fraction)
)


def _cases_table(result: BenchResult, batch: int, columns: Sequence[Column]) -> Table:
    table = cell_table(["tokens", "series", *(column.name for column in columns)], title=f"batch {batch}")
    for tokens in result.lengths:
        found = [result.case(series.name, batch, tokens) for series in result.series]
        cases = [case for case in found if case is not None]
        for case in cases:
            shown = str(tokens) if case is cases[0] else ""
            cells = [Text(column.text(case), style=_style(case)) for column in columns]
            table.add_row(shown, Text(case.series), *cells, end_section=case is cases[-1])
    return table


def _style(case: CaseResult) -> str:
    return {"ok": "", "wrong": "red"}.get(case_state(case), "yellow")


def _largest_batches(result: BenchResult) -> Table:
    budget = bytes_text(result.largest_batches[0].budget_bytes)
    table = cell_table(["tokens", "series", "batch", "peak", "stopped by"], title=f"largest batch within {budget}")
    for found in result.largest_batches:
        batch = f"{found.batch}" + ("" if found.is_limit else " or more")
        peak = "" if found.peak_bytes is None else bytes_text(found.peak_bytes)
        table.add_row(str(found.tokens), Text(found.series), batch, peak, Text(found.reason))
    return table


def _remarks(result: BenchResult) -> Iterator[str]:
    for kind, series, text in findings(result):
        yield ": ".join(filter(None, (kind, series, text)))
