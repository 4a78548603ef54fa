"""`bench.html`: a benchmark's result as one page without scripts, with charts and tables."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2

from hdexport.bench.page.charts import charts, svg
from hdexport.bench.results.formatting import Column, bytes_text, columns_of, ms_text, range_text, ratio_text
from hdexport.bench.results.result import BenchResult, CaseResult, CaseState, RunStatus
from hdexport.bench.results.summary import caution, headline, model_names, notes
from hdruntime.whole_files import write_whole

PAGE_FILE = "bench.html"

_TEMPLATE, _STYLE = "page.html.jinja", "page.css"
"""Files beside this module."""


def write_page(path: Path, result: BenchResult) -> None:
    """Write the page, which loads nothing else."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_text(_TEMPLATE)).render(
        result=result,
        style=_text(_STYLE),
        glance=glance(result),
        notes=notes(result),
        batches=[(batch, _pictures(result, batch), _cases_table(result, batch)) for batch in result.batches],
        headline=headline(result),
        caution=caution(result),
        models=model_names(result),
    )
    write_whole(path, page)


class GlanceRow(NamedTuple):
    """A series at one length, in the table at the top of the page."""

    series: str
    percent: float
    latency: str
    ratio: str
    memory: str
    state: str


def glance(result: BenchResult) -> tuple[int, int, list[GlanceRow]] | None:
    """Tokens, batch and rows for the longest sequences that the first series has figures for, in the smallest batch."""
    shown = [case for case in result.cases if case.series == result.first_series and case.latency is not None]
    if not shown:
        return None
    first = min(shown, key=lambda case: (case.batch, -case.tokens))
    cases = _cases(result, first.batch, first.tokens)
    longest_ms = max(case.latency.p50_ms for case in cases if case.latency is not None)
    rows = [
        GlanceRow(
            series=case.series,
            percent=100 * case.latency.p50_ms / longest_ms if case.latency else 0.0,
            latency=ms_text(case.latency.p50_ms) if case.latency else "",
            ratio=ratio_text(result.ratio_to_first(case)),
            memory=bytes_text(peak) if case.memory and (peak := case.memory.peak_bytes) is not None else "",
            state=case.state.value,
        )
        for case in cases
    ]
    return first.tokens, first.batch, rows


class _TableCell(NamedTuple):
    """One value. `kind` is a CSS class, `small` is smaller text beside the value, `span` is a number of columns."""

    text: str
    kind: str = "number"
    small: str = ""
    span: int = 1


class _Table(NamedTuple):
    """Rows of (series, cells), grouped by tokens, under columns of (name, unit)."""

    columns: list[tuple[str, str]]
    groups: dict[int, list[tuple[str, list[_TableCell]]]]


def _cases_table(result: BenchResult, batch: int) -> _Table:
    """All cases of a batch size; a figure that no case has gets no column."""
    cases = [case for case in result.cases if case.batch == batch]
    # On the page each kind of memory has its own column.
    known = [column for name, column in columns_of(result).items() if name != "memory"]
    columns = [column for column in known if any(map(column.text, cases))]
    groups: dict[int, list[tuple[str, list[_TableCell]]]] = {}
    for tokens in sorted({case.tokens for case in cases}):
        beside = _cases(result, batch, tokens)
        fastest = _fastest_right(beside)
        groups[tokens] = [
            (case.series, list(_cells(result, case, columns, is_fastest=case is fastest))) for case in beside
        ]
    return _Table(columns=[(column.name, column.unit) for column in columns], groups=groups)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _pictures(result: BenchResult, batch: int) -> dict[str, str]:
    """Id of a chart -> SVG."""
    return {f"chart-{key}-{batch}": svg(spec) for key, spec in charts(result, batch).items()}


def _cases(result: BenchResult, batch: int, tokens: int) -> list[CaseResult]:
    """Cases of one batch size and length, in the order of the series."""
    cases = (result.case(series.name, batch, tokens) for series in result.series)
    return [case for case in cases if case is not None]


def _cells(result: BenchResult, case: CaseResult, columns: list[Column], *, is_fastest: bool) -> Iterator[_TableCell]:
    if case.status is not RunStatus.OK:
        yield _TableCell(case.status.value, "failed", case.reason or "", len(columns))
        return
    for column in columns:
        text = column.text(case)
        if column.name == "p50" and is_fastest:
            yield _TableCell(text, "best")
        elif column.name == "outputs":
            yield _TableCell(text, "badge-cell")
        elif column.name == "ratio" and case.series != result.first_series:
            yield _TableCell(text, small=range_text(result.ratio_to_first(case)))
        else:
            yield _TableCell(text)


def _fastest_right(cases: list[CaseResult]) -> CaseResult | None:
    """Fastest case with right outputs, if two or more cases are right."""
    right = [case for case in cases if case.latency is not None and case.state is CaseState.OK]
    return min(right, key=lambda case: case.latency.p50_ms if case.latency else 0.0) if len(right) > 1 else None
