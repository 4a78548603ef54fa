"""`bench.html`: a benchmark's result as one page that needs no network, with interactive charts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import jinja2
import vl_convert

from hdexport.bench.page.charts import DARK_COLOURS, LIGHT_COLOURS, Look, SeriesStyle, chart
from hdexport.bench.page.figures import FIGURES, Figure, describe
from hdexport.bench.results.result import BenchResult, CaseResult, LargestBatch, Status
from hdexport.bench.results.words import (
    Column,
    bytes_text,
    case_state,
    caution,
    columns_of,
    findings,
    headline,
    model_names,
    ms_text,
    range_text,
    ratio_text,
)
from hdruntime.whole_files import write_whole

PAGE_FILE = "bench.html"

_TEMPLATE, _STYLE, _SCRIPT = "page.html.jinja", "page.css", "page.js"
"""Files beside this module."""

_CHART_HEIGHT = 250

_LOOK = Look(
    series=[f"var(--series-{n})" for n in range(len(LIGHT_COLOURS))],
    ink="currentColor",
    wrong="var(--wrong)",
    has_legend=False,
)
"""The page's style sheet has the colours, so that charts change with it: dark, or on paper."""

_SWATCH_SHAPES = {
    "circle": "M24 10a4.5 4.5 0 1 1-9 0a4.5 4.5 0 1 1 9 0Z",
    "square": "M15.5 6h8v8h-8Z",
    "triangle-up": "M19.5 5l5 9h-10Z",
    "diamond": "M19.5 4l5 6l-5 6l-5-6Z",
    "cross": "M17.9 5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4Z",
    "triangle-down": "M19.5 15l-5-9h10Z",
}
"""Paths in a picture of 39 x 20, as Vega draws the shapes."""


def write_page(path: Path, result: BenchResult) -> None:
    """Writes the page of about one megabyte, most of it the library that draws the charts."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_text(_TEMPLATE))
    measured = {case.series for case in result.cases}
    charts = _charts(result)
    specs = {part["id"]: part["spec"] for parts in charts.values() for part in parts}
    page = template.render(
        result=result,
        style=_text(_STYLE),
        palette={"light": LIGHT_COLOURS, "dark": DARK_COLOURS},
        script=_script(),
        legend=[(n, series.name) for n, series in enumerate(result.series) if series.name in measured],
        swatches=[_swatch(n) for n in range(len(result.series))],
        glance=glance(result),
        findings=findings(result),
        batches=[(batch, charts[batch], _cases_table(result, batch)) for batch in result.batches],
        largest_batches=_largest_batches_table(result) if result.largest_batches else None,
        # No text in the specifications is markup, even with "<" in it.
        specs=json.dumps(specs, allow_nan=False).replace("<", "\\u003c"),
        headline=headline(result),
        caution=caution(result),
        models=model_names(result),
    )
    write_whole(path, page)


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


class _TableCell(NamedTuple):
    """One value; `kind` is ``number``, ``best``, ``wrong``, ``failed`` or ``text``, `small` is smaller text beside it,
    and `span` the number of columns that it takes."""

    text: str
    kind: str = "number"
    small: str = ""
    span: int = 1


class _TableRow(NamedTuple):
    """The row of one series and its number."""

    number: int
    series: str
    cells: list[_TableCell]


class _Table(NamedTuple):
    """Rows grouped by tokens, under columns of (name, unit)."""

    columns: list[tuple[str, str]]
    groups: dict[int, list[_TableRow]]


def _cases_table(result: BenchResult, batch: int) -> _Table:
    """All cases of a batch size; figures that none of them has get no column."""
    cases = [case for case in result.cases if case.batch == batch]
    # On the page each kind of memory has its own column.
    known = [column for name, column in columns_of(result).items() if name != "memory"]
    columns = [column for column in known if any(map(column.text, cases))]
    groups: dict[int, list[_TableRow]] = {}
    for tokens in sorted({case.tokens for case in cases}):
        beside = _beside(result, batch, tokens)
        best = _fastest_right([case for _, case in beside])
        groups[tokens] = [
            _TableRow(index, case.series, list(_cells(result, case, columns, is_best=case is best)))
            for index, case in beside
        ]
    return _Table(columns=[(column.name, column.unit) for column in columns], groups=groups)


def _largest_batches_table(result: BenchResult) -> _Table:
    indices = {series.name: index for index, series in enumerate(result.series)}
    found = sorted(result.largest_batches, key=lambda found: (found.tokens, indices[found.series]))
    groups: dict[int, list[_TableRow]] = {}
    for each in found:
        groups.setdefault(each.tokens, []).append(
            _TableRow(indices[each.series], each.series, _largest_batch_cells(each))
        )
    return _Table(columns=[("batch", ""), ("peak", ""), ("stopped by", "")], groups=groups)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The page's script, with the libraries that it draws with."""
    script = vl_convert.javascript_bundle(_text(_SCRIPT))
    # The script must not end the element that it is in; "</script" occurs in strings only, where this means the same.
    return re.sub("</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _charts(result: BenchResult) -> dict[int, list[dict[str, Any]]]:
    """Batch -> its charts: ``id``, ``title`` and Vega-Lite's ``spec``."""
    charts: dict[int, list[dict[str, Any]]] = {}
    for batch in result.batches:
        drawn = [(figure, chart(result, figure, batch, _LOOK)) for figure in FIGURES]
        charts[batch] = [_chart(result, figure, batch, layers) for figure, layers in drawn if layers is not None]
    return charts


def _chart(result: BenchResult, figure: Figure, batch: int, layers: alt.LayerChart) -> dict[str, Any]:
    text = describe(result, figure, batch)
    sized = layers.properties(width="container", height=_CHART_HEIGHT, description=text)
    return {"id": f"{figure.key}-{batch}", "title": figure.title, "spec": sized.to_dict()}


def _swatch(index: int) -> dict[str, Any]:
    style = SeriesStyle.of(index)
    dash = "none" if style.dash == (1, 0) else " ".join(map(str, style.dash))
    return {"colour": style.colour, "dash": dash, "path": _SWATCH_SHAPES[style.shape]}


def _beside(result: BenchResult, batch: int, tokens: int) -> list[tuple[int, CaseResult]]:
    """Cases of one shape, each with the number of its series."""
    found = [result.case(series.name, batch, tokens) for series in result.series]
    return [(index, case) for index, case in enumerate(found) if case is not None]


def _cells(result: BenchResult, case: CaseResult, columns: list[Column], *, is_best: bool) -> Iterator[_TableCell]:
    if case.status is not Status.OK:
        yield _TableCell(case.status.value, "failed", case.reason or "", len(columns))
        return
    for column in columns:
        text = column.text(case)
        if column.name == "p50" and is_best:
            yield _TableCell(text, "best")
        elif column.name == "error" and case_state(case) == "wrong":
            yield _TableCell(text, "wrong", "wrong")
        elif column.name == "ratio" and case.series != result.first_series:
            yield _TableCell(text, small=range_text(result.ratio_to_first(case)))
        else:
            yield _TableCell(text)


def _fastest_right(cases: list[CaseResult]) -> CaseResult | None:
    """The fastest case whose answer is right, if two or more are right."""
    right = [case for case in cases if case.latency is not None and case_state(case) == Status.OK.value]
    return min(right, key=lambda case: case.latency.p50_ms if case.latency else 0.0) if len(right) > 1 else None


def _largest_batch_cells(found: LargestBatch) -> list[_TableCell]:
    batch = _TableCell(str(found.batch), small="" if found.is_limit else "or more")
    return [
        batch,
        _TableCell("" if found.peak_bytes is None else bytes_text(found.peak_bytes)),
        _TableCell(found.reason, "text"),
    ]
