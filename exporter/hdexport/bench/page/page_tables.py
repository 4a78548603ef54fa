"""The tables of a benchmark's page, as text in cells."""

from __future__ import annotations

__all__ = ["Cell", "Glance", "Row", "Table", "cases_table", "glance", "largest_batches_table"]

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hdexport.bench.results.columns import Column, columns_of
from hdexport.bench.results.figure_text import bytes_text, case_state, ms_text, range_text, ratio_text
from hdexport.bench.results.result import BenchResult, CaseResult, LargestBatch, Status


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
    # On the page each kind of memory has its own column.
    known = [column for name, column in columns_of(result).items() if name != "memory"]
    columns = [column for column in known if any(map(column.text, cases))]
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


def _cells(result: BenchResult, case: CaseResult, columns: list[Column], *, is_best: bool) -> Iterator[Cell]:
    if case.status is not Status.OK:
        yield Cell(text=case.status.value, small=case.reason or "", kind="failed", span=len(columns))
        return
    for column in columns:
        small, kind = "", "number"
        if column.name == "p50" and is_best:
            kind = "best"
        elif column.name == "error" and case_state(case) == "wrong":
            small = kind = "wrong"
        elif column.name == "ratio" and case.series != result.first_series:
            small = range_text(result.ratio_to_first(case))
        yield Cell(text=column.text(case), small=small, kind=kind)


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
        latency="" if case.latency is None else ms_text(case.latency.p50_ms),
        ratio=ratio_text(result.ratio_to_first(case)),
        memory="" if peak is None else bytes_text(peak),
        state=case_state(case),
    )
