"""The tables of a benchmark's page, as text in cells."""

from __future__ import annotations

__all__ = ["Cell", "Glance", "Row", "Table", "cases_table", "glance", "largest_batches_table"]

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hdexport.bench.results.figure_text import (
    bytes_text,
    case_state,
    cosine_text,
    error_text,
    fraction_text,
    number_text,
    range_text,
    ratio_text,
)
from hdexport.bench.results.result import BenchResult, CaseResult, LargestBatch, Latency, PeakMemory, Status


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value.

    Attributes:
        text: its value.
        small: what stands beside it, smaller.
        kind: ``number``, ``best``, ``wrong``, ``failed`` or ``text``.
        span: columns that it takes.
    """

    text: str
    small: str = ""
    kind: str = "number"
    span: int = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One series; `index` is its number."""

    index: int
    series: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in groups, one a length.

    Attributes:
        columns: (name, unit) of each cell.
        groups: tokens -> rows.
    """

    columns: tuple[tuple[str, str], ...]
    groups: dict[int, list[Row]]


@dataclass(frozen=True, kw_only=True)
class Glance:
    """One bar of the overview.

    Attributes:
        percent: length of the bar, of the longest; 0 where there is no latency.
        state: ``ok``, ``wrong`` or why there is no latency.
    """

    index: int
    series: str
    percent: float
    latency: str
    ratio: str
    memory: str
    state: str


def cases_table(result: BenchResult, batch: int) -> Table:
    """All cases of a batch size; figures that none of them has have no column."""
    cases = [case for case in result.cases if case.batch == batch]
    columns = [column for column in _COLUMNS if any(column.text(result, case) for case in cases)]
    names = [series.name for series in result.series]
    groups: dict[int, list[Row]] = {}
    for tokens in sorted({case.tokens for case in cases}):
        of_length = [case for case in cases if case.tokens == tokens]
        best = _fastest_right(of_length)
        groups[tokens] = [
            Row(index=index, series=name, cells=tuple(_cells(result, case, columns, is_best=case is best)))
            for index, name in enumerate(names)
            for case in of_length
            if case.series == name
        ]
    return Table(columns=tuple((column.name, column.unit) for column in columns), groups=groups)


def largest_batches_table(result: BenchResult) -> Table:
    """The largest batches within the memory budget."""
    names = [series.name for series in result.series]
    groups: dict[int, list[Row]] = defaultdict(list)
    for found in sorted(result.largest_batches, key=lambda found: (found.tokens, names.index(found.series))):
        row = Row(index=names.index(found.series), series=found.series, cells=_largest_batch_cells(found))
        groups[found.tokens].append(row)
    return Table(columns=(("batch", ""), ("peak", ""), ("stopped by", "")), groups=dict(groups))


def glance(result: BenchResult) -> tuple[int, int, list[Glance]] | None:
    """Tokens, batch and bars of the longest texts that the first series has figures for, in the smallest batch."""
    shown = [case for case in result.cases if case.series == result.first_series and case.latency is not None]
    if not shown:
        return None
    first = min(shown, key=lambda case: (case.batch, -case.tokens))
    latencies = [case.latency.p50_ms for case in _beside(result, first) if case.latency is not None]
    bars = [_glance(result, case, max(latencies)) for case in _beside(result, first)]
    return first.tokens, first.batch, bars


@dataclass(frozen=True, kw_only=True)
class _Column:
    name: str
    unit: str
    text: Callable[[BenchResult, CaseResult], str]
    small: Callable[[BenchResult, CaseResult], str] = lambda result, case: ""


def _latency(value: Callable[[Latency], float]) -> Callable[[BenchResult, CaseResult], str]:
    return lambda result, case: "" if case.latency is None else number_text(value(case.latency))


def _memory(value: Callable[[PeakMemory], int | None]) -> Callable[[BenchResult, CaseResult], str]:
    def text(result: BenchResult, case: CaseResult) -> str:
        size_bytes = None if case.memory is None else value(case.memory)
        return "" if size_bytes is None else number_text(size_bytes / 1e6)

    return text


_COLUMNS = (
    _Column(name="p50", unit="ms", text=_latency(lambda latency: latency.p50_ms)),
    _Column(name="p95", unit="ms", text=_latency(lambda latency: latency.p95_ms)),
    _Column(name="p99", unit="ms", text=_latency(lambda latency: latency.p99_ms)),
    _Column(name="mean", unit="ms", text=_latency(lambda latency: latency.mean_ms)),
    _Column(name="sd", unit="ms", text=_latency(lambda latency: latency.sd_ms)),
    _Column(
        name="ratio",
        unit="to first",
        text=lambda result, case: ratio_text(result.ratio_to_first(case)),
        small=lambda result, case: (
            "" if case.series == result.first_series else range_text(result.ratio_to_first(case))
        ),
    ),
    _Column(
        name="tokens/s",
        unit="",
        text=lambda result, case: "" if case.tokens_per_s is None else number_text(case.tokens_per_s),
    ),
    _Column(name="GPU", unit="MB", text=_memory(lambda memory: memory.vram_bytes)),
    _Column(name="allocator", unit="MB", text=_memory(lambda memory: memory.allocator_bytes)),
    _Column(name="TensorRT", unit="MB", text=_memory(lambda memory: memory.engine_bytes)),
    _Column(name="resident", unit="MB", text=_memory(lambda memory: memory.rss_bytes)),
    _Column(name="added", unit="MB", text=_memory(lambda memory: memory.growth_bytes)),
    _Column(name="error", unit="max abs", text=lambda result, case: error_text(case.error)),
    _Column(name="cosine", unit="least", text=lambda result, case: cosine_text(case.error)),
    _Column(
        name="roofline",
        unit="",
        text=lambda result, case: "" if case.roofline is None else fraction_text(case.roofline.fraction),
    ),
)


def _cells(result: BenchResult, case: CaseResult, columns: list[_Column], *, is_best: bool) -> Iterator[Cell]:
    if case.status is not Status.OK:
        yield Cell(text=case.status.value, small=case.reason or "", kind="failed", span=len(columns))
        return
    for column in columns:
        is_wrong = column.name == "error" and case_state(case) == "wrong"
        small = "wrong" if is_wrong else column.small(result, case)
        kind = "wrong" if is_wrong else "best" if is_best and column.name == "p50" else "number"
        yield Cell(text=column.text(result, case), small=small, kind=kind)


def _fastest_right(cases: list[CaseResult]) -> CaseResult | None:
    """The fastest whose answer is right, if there are two or more to choose from."""
    right = [case for case in cases if case.latency is not None and case_state(case) == Status.OK.value]
    return min(right, key=lambda case: case.latency.p50_ms if case.latency else 0.0) if len(right) > 1 else None


def _largest_batch_cells(found: LargestBatch) -> tuple[Cell, ...]:
    peak = "" if found.peak_bytes is None else bytes_text(found.peak_bytes)
    batch = Cell(text=str(found.batch), small="" if found.is_limit else "or more")
    return batch, Cell(text=peak), Cell(text=found.reason, kind="text")


def _beside(result: BenchResult, first: CaseResult) -> list[CaseResult]:
    found = (result.case(series.name, first.batch, first.tokens) for series in result.series)
    return [case for case in found if case is not None]


def _glance(result: BenchResult, case: CaseResult, longest_ms: float) -> Glance:
    peak = None if case.memory is None else case.memory.peak_bytes
    return Glance(
        index=[series.name for series in result.series].index(case.series),
        series=case.series,
        percent=0.0 if case.latency is None else 100 * case.latency.p50_ms / longest_ms,
        latency="" if case.latency is None else f"{number_text(case.latency.p50_ms)} ms",
        ratio=ratio_text(result.ratio_to_first(case)),
        memory="" if peak is None else bytes_text(peak),
        state=case_state(case),
    )
