"""The tables of a benchmark's page, as text in cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hdexport.bench.results.columns import Column, columns_of
from hdexport.bench.results.figure_text import bytes_text, case_state, ms_text, range_text, ratio_text
from hdexport.bench.results.result import BenchResult, CaseResult, LargestBatch, Status


class TableCell(NamedTuple):
    """One value.

    Attributes:
        text: its value.
        kind: ``number``, ``best``, ``wrong``, ``failed`` or ``text``.
        small: smaller text beside it.
        span: columns that it takes.
    """

    text: str
    kind: str = "number"
    small: str = ""
    span: int = 1


class TableRow(NamedTuple):
    """One series."""

    number: int
    series: str
    cells: list[TableCell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One group of rows per length.

    Attributes:
        columns: (name, unit) of each cell.
        groups: tokens -> rows.
    """

    columns: list[tuple[str, str]]
    groups: dict[int, list[TableRow]]


def cases_table(result: BenchResult, batch: int) -> Table:
    """All cases of a batch size; figures that none of them has get no column."""
    cases = [case for case in result.cases if case.batch == batch]
    # On the page each kind of memory has its own column.
    known = [column for name, column in columns_of(result).items() if name != "memory"]
    columns = [column for column in known if any(map(column.text, cases))]
    groups: dict[int, list[TableRow]] = {}
    for tokens in sorted({case.tokens for case in cases}):
        beside = _beside(result, batch, tokens)
        best = _fastest_right([case for _, case in beside])
        groups[tokens] = [
            TableRow(index, case.series, list(_cells(result, case, columns, is_best=case is best)))
            for index, case in beside
        ]
    return Table(columns=[(column.name, column.unit) for column in columns], groups=groups)


def largest_batches_table(result: BenchResult) -> Table:
    """The largest batches within the memory budget."""
    indices = {series.name: index for index, series in enumerate(result.series)}
    found = sorted(result.largest_batches, key=lambda found: (found.tokens, indices[found.series]))
    groups: dict[int, list[TableRow]] = {}
    for each in found:
        groups.setdefault(each.tokens, []).append(
            TableRow(indices[each.series], each.series, _largest_batch_cells(each))
        )
    return Table(columns=[("batch", ""), ("peak", ""), ("stopped by", "")], groups=groups)


def glance(result: BenchResult) -> tuple[int, int, list[dict[str, object]]] | None:
    """Tokens, batch and bars of the longest texts that the first series has figures for, in the smallest batch."""
    shown = [case for case in result.cases if case.series == result.first_series and case.latency is not None]
    if not shown:
        return None
    first = min(shown, key=lambda case: (case.batch, -case.tokens))
    beside = _beside(result, first.batch, first.tokens)
    longest_ms = max(case.latency.p50_ms for _, case in beside if case.latency is not None)
    bars: list[dict[str, object]] = [
        {
            "index": index,
            "series": case.series,
            "percent": 100 * case.latency.p50_ms / longest_ms if case.latency else 0.0,
            "latency": ms_text(case.latency.p50_ms) if case.latency else "",
            "ratio": ratio_text(result.ratio_to_first(case)),
            "memory": bytes_text(peak) if case.memory and (peak := case.memory.peak_bytes) is not None else "",
            "state": case_state(case),
        }
        for index, case in beside
    ]
    return first.tokens, first.batch, bars


def _beside(result: BenchResult, batch: int, tokens: int) -> list[tuple[int, CaseResult]]:
    """The cases of one shape with the numbers of their series."""
    found = [result.case(series.name, batch, tokens) for series in result.series]
    return [(index, case) for index, case in enumerate(found) if case is not None]


def _cells(result: BenchResult, case: CaseResult, columns: list[Column], *, is_best: bool) -> Iterator[TableCell]:
    if case.status is not Status.OK:
        yield TableCell(case.status.value, "failed", case.reason or "", len(columns))
        return
    for column in columns:
        text = column.text(case)
        if column.name == "p50" and is_best:
            yield TableCell(text, "best")
        elif column.name == "error" and case_state(case) == "wrong":
            yield TableCell(text, "wrong", "wrong")
        elif column.name == "ratio" and case.series != result.first_series:
            yield TableCell(text, small=range_text(result.ratio_to_first(case)))
        else:
            yield TableCell(text)


def _fastest_right(cases: list[CaseResult]) -> CaseResult | None:
    """The fastest whose answer is right, if there are two or more to choose from."""
    right = [case for case in cases if case.latency is not None and case_state(case) == Status.OK.value]
    return min(right, key=lambda case: case.latency.p50_ms if case.latency else 0.0) if len(right) > 1 else None


def _largest_batch_cells(found: LargestBatch) -> list[TableCell]:
    batch = TableCell(str(found.batch), small="" if found.is_limit else "or more")
    return [
        batch,
        TableCell("" if found.peak_bytes is None else bytes_text(found.peak_bytes)),
        TableCell(found.reason, "text"),
    ]
