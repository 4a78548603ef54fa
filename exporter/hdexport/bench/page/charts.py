"""Charts of a benchmark over the length, one per figure and batch size: for the page, and as PNGs for slides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from hdexport.bench.page.chart_rows import ChartRows, chart_rows
from hdexport.bench.page.figures import FIGURES, Figure
from hdexport.bench.page.palette import LIGHT_COLOURS, SeriesStyle
from hdexport.bench.results.result import BenchResult
from hdruntime.whole_files import write_whole

_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_POINT_AREA = 64
_RING_AREA = 260
"""Square pixels of a point, and of the ring around a wrong answer."""

_EDGE, _FAILURE_STEP = 12, 17
"""Pixels from the edge of the plot to the first mark of a failure, and from each to the next one of that length."""

_GRID_OPACITY = 0.15
_LENGTH_ROOM = 1.2
"""Factor between the outermost lengths and the ends of their axis."""

_PNG_WIDTH, _PNG_HEIGHT, _PNG_SCALE = 940, 500, 1.5
"""Pixels of the plot, and pixels of the file for each: with the legend about 1900 wide, as a slide."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How charts look; colours as CSS has them.

    Attributes:
        series: in turn.
        ink: of text and axes.
        wrong: of the rings around wrong answers.
        has_legend: whether the chart has one; else the page around it has one.
    """

    series: Sequence[str]
    ink: str
    wrong: str
    has_legend: bool


_PAPER = Look(series=LIGHT_COLOURS, ink="#22262b", wrong="#c4141c", has_legend=True)


def chart(result: BenchResult, figure: Figure, batch: int, look: Look) -> alt.LayerChart | None:
    """One chart: one line per series, a ring around each wrong answer, and failures at the edge.

    A series is shown while the chart's parameter ``shown``, a list of booleans, is true at its number.

    Returns:
        None if no case of the batch size has that figure.
    """
    rows = chart_rows(result, figure, batch)
    if rows is None:
        return None
    style = _Style(result, look)
    x = _x(result.lengths)
    layers = _lines(rows, style, x, _y(figure, rows), has_whiskers=figure.high is not None)
    layers += _failures(rows, style, x, at_top=figure.fails_high)
    shown = alt.param(name="shown", value=[True] * len(result.series))
    return alt.layer(*layers).add_params(shown).configure(**_config(look.ink))


def write_pngs(folder: Path, result: BenchResult) -> list[Path]:
    """Write one PNG per figure and batch size, on white, with title and legend.

    Args:
        folder: where ``latency-batch-1.png`` and the others go.

    Returns:
        The files, in the order of the page.

    Raises:
        OSError: a file cannot be written.
    """
    paths = []
    for batch in result.batches:
        for figure in FIGURES:
            drawn = chart(result, figure, batch, _PAPER)
            if drawn is not None:
                paths.append(folder / f"{figure.key}-batch-{batch}.png")
                write_whole(paths[-1], _png(drawn, f"{figure.title}, batch {batch}", _subtitle(result)))
    return paths


class _Style:
    """Scales that give each series its colour, dash and shape, the same in every chart."""

    def __init__(self, result: BenchResult, look: Look) -> None:
        measured = {case.series for case in result.cases}
        styles = {s.name: SeriesStyle.of(n) for n, s in enumerate(result.series) if s.name in measured}
        self.ink, self.wrong = look.ink, look.wrong
        legend = alt.Legend(title=None, symbolOpacity=1, symbolStrokeWidth=0) if look.has_legend else None
        self.colour = alt.Color("series:N", scale=_by_series(styles, "colour", look.series), legend=legend)
        self.shape = alt.Shape("series:N", scale=_by_series(styles, "shape"), legend=legend)
        # A legend of dashes would dash the outlines of the shapes.
        self.dash = alt.StrokeDash("series:N", scale=_by_series(styles, "dash"), legend=None)


def _by_series(styles: dict[str, SeriesStyle], part: str, choices: Sequence[str] | None = None) -> alt.Scale:
    values = [getattr(style, part) for style in styles.values()]
    return alt.Scale(domain=list(styles), range=values if choices is None else [choices[value] for value in values])


def _lines(rows: ChartRows, style: _Style, x: alt.X, y: alt.Y, *, has_whiskers: bool) -> list[alt.Chart]:
    data = alt.Data(values=rows.points)
    base = alt.Chart(data).transform_filter("shown[datum.i]").encode(x=x, y=y, color=style.colour)
    layers = [base.mark_line(strokeWidth=2.5).encode(strokeDash=style.dash)]
    if has_whiskers:
        layers.append(base.mark_rule(strokeWidth=1.5).encode(y2="high:Q"))
        layers.append(base.mark_tick(orient="horizontal", size=8, thickness=1.5).encode(y="high:Q"))
    tooltip = _tooltip("series", "tokens", "batch", **{f"detail_{n}": label for n, label in enumerate(rows.labels)})
    tooltip += _tooltip("answer")
    points = base.mark_point(filled=True, opacity=1, size=_POINT_AREA)
    layers.append(points.encode(shape=style.shape, tooltip=tooltip))
    if any(row["is_wrong"] for row in rows.points):
        rings = alt.Chart(data).transform_filter("shown[datum.i] && datum.is_wrong").encode(x=x, y=y, tooltip=tooltip)
        ring = rings.mark_point(shape="circle", size=_RING_AREA, filled=False, strokeWidth=2, opacity=1)
        layers.append(ring.encode(color=alt.value(style.wrong)))
    return layers


def _failures(rows: ChartRows, style: _Style, x: alt.X, *, at_top: bool) -> list[alt.Chart]:
    """A layer for each rank: a place in pixels belongs to a mark, not to a row."""
    layers = []
    tooltip = _tooltip("series", "tokens", "batch", "what", "reason")
    for rank in sorted({row["rank"] for row in rows.failures}):
        depth = _EDGE + _FAILURE_STEP * rank
        base = alt.Chart(alt.Data(values=[row for row in rows.failures if row["rank"] == rank]))
        y = alt.YValue(depth if at_top else alt.ExprRef(f"height - {depth}"))
        base = base.transform_filter("shown[datum.i]").encode(x=x, y=y, tooltip=tooltip)
        points = base.mark_point(filled=False, opacity=1, size=_POINT_AREA, strokeWidth=2)
        layers.append(points.encode(shape=style.shape, color=style.colour))
        texts = base.encode(text="what:N", color=alt.value(style.ink))
        # Words stand where there is room: left of the marks of the longest texts.
        for condition, align, shift in (("datum.is_longest", "right", -8), ("!datum.is_longest", "left", 8)):
            layers.append(texts.transform_filter(condition).mark_text(align=align, dx=shift, fontSize=11))
    return layers


def _tooltip(*fields: str, **titles: str) -> list[alt.Tooltip]:
    named = {field: field for field in fields} | titles
    return [alt.Tooltip(f"{field}:N", title=title) for field, title in named.items()]


def _x(lengths: Sequence[int]) -> alt.X:
    domain = [lengths[0] / _LENGTH_ROOM, lengths[-1] * _LENGTH_ROOM]
    return alt.X(
        "tokens:Q",
        title="tokens",
        scale=alt.Scale(type="log", base=2, domain=domain, nice=False),
        axis=alt.Axis(values=list(lengths), format="d", labelOverlap="greedy", grid=False),
    )


def _y(figure: Figure, rows: ChartRows) -> alt.Y:
    low, high = rows.domain
    axis: dict[str, Any] = {"format": figure.tick_format, "tickCount": 5}
    label = "replace(datum.label, 'e+0', '')"
    if rows.zero is not None:
        decades = [10.0**n for n in range(round(math.log10(low)) + 1, math.floor(math.log10(high)) + 1)]
        axis["values"] = [rows.zero, *decades[:: math.ceil(len(decades) / 5)]]
        label = f"datum.index == 0 ? '0' : {label}"
    faint = {"condition": {"test": "datum.label", "value": _GRID_OPACITY}, "value": _GRID_OPACITY / 3}
    failures = max((row["rank"] + 1 for row in rows.failures), default=0)
    kind = {"type": "log", "padding": _EDGE + _FAILURE_STEP * failures} if figure.is_log else {"type": "linear"}
    return alt.Y(
        "y:Q",
        title=figure.axis,
        scale=alt.Scale(domain=[low, high], nice=False, **kind),
        axis=alt.Axis(labelExpr=label, gridOpacity=faint, **axis),
    )


def _config(ink: str) -> dict[str, Any]:
    axis = {"labelColor": ink, "titleColor": ink, "gridColor": ink, "domainColor": ink, "tickColor": ink}
    return {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": axis | {"titleFontWeight": 500},
        "legend": {"labelColor": ink},
        "title": {"color": ink, "subtitleColor": ink},
    }


def _png(drawn: alt.LayerChart, title: str, subtitle: str) -> bytes:
    heading = alt.Title(title, subtitle=subtitle, anchor="start", fontSize=24, subtitleFontSize=15, offset=18)
    spec = drawn.properties(width=_PNG_WIDTH, height=_PNG_HEIGHT, title=heading, padding=24).to_dict()
    spec["config"]["background"] = "white"
    spec["config"]["axis"] |= {"labelFontSize": 16, "titleFontSize": 17}
    spec["config"]["legend"] |= {"labelFontSize": 17, "labelLimit": 420, "rowPadding": 8, "symbolSize": 160}
    return vl_convert.vegalite_to_png(spec, scale=_PNG_SCALE)


def _subtitle(result: BenchResult) -> str:
    parts = [result.environment.get("gpu"), result.environment.get("cpu"), result.date[:10]]
    if any(case.error is not None and not case.error.passed for case in result.cases):
        parts.append("a red ring marks a wrong answer")
    return ", ".join(filter(None, parts))
