"""`bench.html`: a benchmark's result as one page that needs no network, with interactive charts."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert

from hdexport.bench.page.charts import Look, chart
from hdexport.bench.page.figures import FIGURES, Figure, describe
from hdexport.bench.page.page_tables import cases_table, glance, largest_batches_table
from hdexport.bench.page.palette import DARK_COLOURS, LIGHT_COLOURS, SeriesStyle
from hdexport.bench.results.findings import findings
from hdexport.bench.results.headline import caution, headline, model_names
from hdexport.bench.results.result import BenchResult
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
    """Write the page; about one megabyte, most of it the library that draws the charts.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, _page(result))


def _page(result: BenchResult) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_text(_TEMPLATE))
    measured = {case.series for case in result.cases}
    charts = _charts(result)
    specs = {part["id"]: part["spec"] for parts in charts.values() for part in parts}
    return template.render(
        result=result,
        style=_text(_STYLE),
        palette={"light": LIGHT_COLOURS, "dark": DARK_COLOURS},
        script=_script(),
        legend=[(n, series.name) for n, series in enumerate(result.series) if series.name in measured],
        swatches=[_swatch(n) for n in range(len(result.series))],
        glance=glance(result),
        findings=findings(result),
        batches=[(batch, charts[batch], cases_table(result, batch)) for batch in result.batches],
        largest_batches=largest_batches_table(result) if result.largest_batches else None,
        # No text in the specifications is markup, even with "<" in it.
        specs=json.dumps(specs, allow_nan=False).replace("<", "\\u003c"),
        headline=headline(result),
        caution=caution(result),
        models=model_names(result),
    )


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The page's own, with the libraries that it draws with."""
    script = vl_convert.javascript_bundle(_text(_SCRIPT))
    # The script must not end the element that it is in; "</script" occurs in strings only, where this means the same.
    return re.sub("</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _charts(result: BenchResult) -> dict[int, list[dict[str, Any]]]:
    """Batch -> the charts that there are: ``id``, ``title`` and Vega-Lite's ``spec``."""
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
