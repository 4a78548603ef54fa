"""Charts of a benchmark over the length, one per figure and batch size: for the page, and as PNGs for slides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import vl_convert

from hdexport.bench.page.figures import FIGURES, Figure
from hdexport.bench.results.result import BenchResult, CaseResult, Status
from hdexport.bench.results.words import case_state
from hdruntime.whole_files import write_whole

_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_POINT_AREA = 64
_RING_AREA = 260
"""Area of a point, and of the ring around a wrong answer, in square pixels."""

_EDGE, _FAILURE_STEP = 12, 17
"""Pixels from the edge of the plot to the first mark of a failure, and from each to the next one of that length."""

_GRID_OPACITY = 0.15
_LENGTH_ROOM = 1.2
"""Factor between the outermost lengths and the ends of their axis."""

_PNG_WIDTH, _PNG_HEIGHT, _PNG_SCALE = 940, 500, 1.5
"""Pixels of the plot, and pixels of the file for each: with the legend about 1900 wide, as a slide."""

_LEAST_FACTOR = 3.0
"""Least factor that a logarithmic axis spans: on a shorter axis, noise would look like a trend."""

LIGHT_COLOURS = ("#0068a8", "#d95f02", "#6c12f3", "#1ea0a9", "#5c2805", "#183f49")
"""Colours on white. Found by a search for colours that stay apart in normal vision and in the three kinds of colour
blindness (simulated after Machado et al. 2009), each with a contrast of at least 3 with its background."""

DARK_COLOURS = ("#5ab4f0", "#ff9147", "#5f73f7", "#329574", "#e4f312", "#99fab3")
"""The same colours on the page's dark background."""

_DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (13, 4), (4, 2, 1, 2, 1, 2))
"""Pixels of line and gap, alternating."""

_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
"""Vega's names of shapes."""


class Look(NamedTuple):
    """Colours of a chart, as CSS has them: of the series in turn, of text and axes, and of rings around wrong answers.
    Without a legend, the page around the chart has one."""

    series: Sequence[str]
    ink: str
    wrong: str
    has_legend: bool


class SeriesStyle(NamedTuple):
    """How a series is drawn: the number of its colour, its dash in pixels of line and gap, and Vega's name of its
    shape."""

    colour: int
    dash: tuple[int, ...]
    shape: str

    @classmethod
    def of(cls, index: int) -> SeriesStyle:
        """The style of the series of that number; 36 styles differ."""
        lap = index // len(LIGHT_COLOURS)
        return cls(
            colour=index % len(LIGHT_COLOURS),
            dash=_DASHES[(index + lap) % len(_DASHES)],
            shape=_SHAPES[(index + lap) % len(_SHAPES)],
        )


def chart(result: BenchResult, figure: Figure, batch: int, look: Look) -> alt.LayerChart | None:
    """One chart: one line per series, a ring around each wrong answer, and failures at the edge. None if no case of the
    batch size has the figure.

    A series is shown while the chart's parameter ``shown``, a list of booleans, is true at the series' number.
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
    """Writes one PNG per figure and batch size, such as ``latency-batch-1.png``, on white with title and legend."""
    paths = []
    for batch in result.batches:
        for figure in FIGURES:
            drawn = chart(result, figure, batch, _PAPER)
            if drawn is not None:
                paths.append(folder / f"{figure.key}-batch-{batch}.png")
                write_whole(paths[-1], _png(drawn, f"{figure.title}, batch {batch}", _subtitle(result)))
    return paths


class ChartRows(NamedTuple):
    """The rows that a chart draws.

    Attributes:
        points: one row per case with the figure: ``i`` is the number of its series, ``y`` its place on the axis,
            ``high`` the end of its whisker, ``detail_0``, ... its texts for `labels`.
        failures: one row per case without the figure: ``what`` happened, the ``reason``, ``rank`` among failures of its
            length, ``is_longest`` whether its texts are the longest.
        domain: ends of the y axis.
        zero: place of 0 on a logarithmic axis; None if no value is 0.
    """

    points: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    labels: list[str]
    domain: tuple[float, float]
    zero: float | None


def chart_rows(result: BenchResult, figure: Figure, batch: int) -> ChartRows | None:
    """The rows of one chart; None if no case of the batch size has the figure."""
    cases = [case for case in result.cases if case.batch == batch]
    values = {id(case): value for case in cases if (value := figure.value(case)) is not None}
    if not values:
        return None
    points = [case for case in cases if math.isfinite(values.get(id(case), math.inf))]
    failures = [case for case in cases if case.status is not Status.OK or values.get(id(case)) == math.inf]
    highs = [high for case in points if figure.high and (high := figure.high(case)) is not None]
    domain, zero = _domain([*(values[id(case)] for case in points), *highs], is_log=figure.is_log)
    indices = {series.name: index for index, series in enumerate(result.series)}
    labels = list(dict.fromkeys(label for case in points for label in figure.details(case)))
    return ChartRows(
        points=[_place(case, indices) | _point(figure, case, labels, zero) for case in points],
        failures=_failure_rows(failures, indices, longest=result.lengths[-1]),
        labels=labels,
        domain=domain,
        zero=zero,
    )


_PAPER = Look(series=LIGHT_COLOURS, ink="#22262b", wrong="#c4141c", has_legend=True)


class _Style:
    """Scales that give each series the same colour, dash and shape in every chart."""

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
    """One layer per rank, because a place in pixels belongs to a mark, not to a row."""
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


def _domain(values: Sequence[float], *, is_log: bool) -> tuple[tuple[float, float], float | None]:
    """The ends of an axis for values of at least 0, and the place of 0: below a whole decade under the least value."""
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    if not is_log:
        return (0.0, high * 1.12), None
    widening = max(1.0, math.sqrt(_LEAST_FACTOR * low / high))
    low, high = low / widening, high * widening
    zero = 10.0 ** (math.floor(math.log10(low)) - 1) if len(positive) < len(values) else None
    return (zero or low, high), zero


def _place(case: CaseResult, indices: Mapping[str, int]) -> dict[str, Any]:
    return {"i": indices[case.series], "series": case.series, "tokens": case.tokens, "batch": case.batch}


def _point(figure: Figure, case: CaseResult, labels: Sequence[str], zero: float | None) -> dict[str, Any]:
    details, state = figure.details(case), case_state(case)
    return {
        "y": figure.value(case) or zero or 0.0,
        "high": figure.high(case) if figure.high else None,
        "is_wrong": state == "wrong",
        "answer": "WRONG" if state == "wrong" else "not compared" if case.error is None else "within tolerance",
        # Plain names: labels have spaces and slashes, which are operators in Vega's expressions.
        **{f"detail_{n}": details.get(label, "") for n, label in enumerate(labels)},
    }


def _failure_rows(cases: Sequence[CaseResult], indices: Mapping[str, int], *, longest: int) -> list[dict[str, Any]]:
    ranks: Counter[int] = Counter()
    rows = []
    for case in cases:
        what = "not finite" if case.status is Status.OK else case.status.value
        row = {"what": what, "reason": case.reason or "", "rank": ranks[case.tokens]}
        rows.append(_place(case, indices) | row | {"is_longest": case.tokens == longest})
        ranks[case.tokens] += 1
    return rows
