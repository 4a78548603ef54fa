"""Charts of a benchmark over sequence length, one per figure and batch size: SVG for the page, PNG for slides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import vl_convert

from hdexport.bench.page.figures import FIGURES, Figure
from hdexport.bench.results.result import BenchResult, CaseResult, CaseState, RunStatus
from hdruntime.whole_files import write_whole

_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_POINT_AREA = 64
_RING_AREA = 260
"""Area of a point, and of the ring around outputs that exceed the tolerance, in square pixels."""

_EDGE, _FAILURE_STEP = 12, 17
"""Pixels from the edge of the plot to the first symbol of a failure, and between two symbols of one length."""

_GRID_OPACITY = 0.15
_LENGTH_MARGIN = 1.2
"""Factor between the outermost lengths and the ends of their axis."""

_WIDTH, _HEIGHT, _PNG_SCALE = 940, 500, 1.5
"""Size of a plot in pixels, and pixels of a PNG per pixel: about 1900 wide with the legend, as a slide."""

_MIN_SPAN = 3.0
"""Minimum factor that a logarithmic axis spans: on a shorter axis, noise would look like a trend."""

LIGHT_COLOURS = ("#0068a8", "#d95f02", "#6c12f3", "#1ea0a9", "#5c2805", "#183f49")
"""Colours on white. Found by a search for colours that stay apart in normal vision and in the three kinds of colour
blindness (simulated after Machado et al. 2009), each with a contrast of at least 3 with its background."""

_INK, _WRONG, _DIFFERS = "#22262b", "#c4141c", "#8a6d00"

_DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (13, 4), (4, 2, 1, 2, 1, 2))
"""Pixels of line and gap, alternating."""

_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
"""Vega's names of shapes."""


def chart(result: BenchResult, figure: Figure, batch: int) -> alt.LayerChart | None:
    """One line per series, a ring around each point whose outputs exceed the tolerance, and failures at the edge.

    None if no case of the batch size has the figure.
    """
    rows = chart_rows(result, figure, batch)
    if rows is None:
        return None
    style = _Style(result)
    x = _x(result.lengths)
    layers = _lines(rows, style, x, _y(figure, rows), has_whiskers=figure.high is not None)
    layers += _failures(rows, style, x, at_top=figure.fails_high)
    title = alt.Title(
        f"{figure.title}, batch {batch}", subtitle=_subtitle(result), anchor="start", fontSize=24, subtitleFontSize=15,
        offset=18,
    )  # fmt: skip
    sized = alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT, title=title, padding=24)
    return sized.configure(**_config())


def charts(result: BenchResult, batch: int) -> dict[str, dict[str, Any]]:
    """Key of a figure -> Vega-Lite specification of its chart, without figures that no case of the batch size has."""
    drawn = {figure.key: chart(result, figure, batch) for figure in FIGURES}
    return {key: layers.to_dict() for key, layers in drawn.items() if layers is not None}


def svg(spec: dict[str, Any]) -> str:
    """A chart as an SVG element; texts in it are escaped."""
    return vl_convert.vegalite_to_svg(spec)


def write_pngs(folder: Path, result: BenchResult) -> list[Path]:
    """Write one PNG per figure and batch size, such as ``latency-batch-1.png``."""
    paths = []
    for batch in result.batches:
        for key, spec in charts(result, batch).items():
            paths.append(folder / f"{key}-batch-{batch}.png")
            write_whole(paths[-1], vl_convert.vegalite_to_png(spec, scale=_PNG_SCALE))
    return paths


class ChartRows(NamedTuple):
    """Rows that a chart draws.

    Attributes:
        points: one row per case with the figure: ``y`` is its value on the axis, ``high`` the end of its whisker,
            ``state`` says whether its outputs are within the tolerance.
        failures: one row per case without the figure: ``what`` is its status, ``rank`` its index among failures of its
            length, ``is_longest`` whether its sequences are the longest.
        domain: ends of the y axis.
        zero: value on the axis that stands for 0; None if no value is 0.
    """

    points: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    domain: tuple[float, float]
    zero: float | None


def chart_rows(result: BenchResult, figure: Figure, batch: int) -> ChartRows | None:
    cases = [case for case in result.cases if case.batch == batch]
    values = {id(case): value for case in cases if (value := figure.value(case)) is not None}
    if not values:
        return None
    points = [case for case in cases if math.isfinite(values.get(id(case), math.inf))]
    failures = [case for case in cases if case.status is not RunStatus.OK or values.get(id(case)) == math.inf]
    highs = [high for case in points if figure.high and (high := figure.high(case)) is not None]
    domain, zero = _domain([*(values[id(case)] for case in points), *highs])
    return ChartRows(
        points=[_place(case) | _point(figure, case, zero) for case in points],
        failures=_failure_rows(failures, longest=result.lengths[-1]),
        domain=domain,
        zero=zero,
    )


class _Style:
    """Scales that give each series the same colour, dash and shape in every chart; 36 series differ."""

    def __init__(self, result: BenchResult) -> None:
        measured = {case.series for case in result.cases}
        names = {series.name: n for n, series in enumerate(result.series) if series.name in measured}
        legend = alt.Legend(title=None, symbolOpacity=1, symbolStrokeWidth=0)
        laps = {name: n + n // len(LIGHT_COLOURS) for name, n in names.items()}
        self.colour = alt.Color("series:N", scale=_by_series(names, LIGHT_COLOURS), legend=legend)
        self.shape = alt.Shape("series:N", scale=_by_series(laps, _SHAPES), legend=legend)
        # A legend of dashes would dash the outlines of the shapes.
        self.dash = alt.StrokeDash("series:N", scale=_by_series(laps, _DASHES), legend=None)


def _by_series(numbers: Mapping[str, int], choices: Sequence[Any]) -> alt.Scale:
    return alt.Scale(domain=list(numbers), range=[choices[n % len(choices)] for n in numbers.values()])


def _lines(rows: ChartRows, style: _Style, x: alt.X, y: alt.Y, *, has_whiskers: bool) -> list[alt.Chart]:
    data = alt.Data(values=rows.points)
    base = alt.Chart(data).encode(x=x, y=y, color=style.colour)
    layers = [base.mark_line(strokeWidth=2.5).encode(strokeDash=style.dash)]
    if has_whiskers:
        layers.append(base.mark_rule(strokeWidth=1.5).encode(y2="high:Q"))
        layers.append(base.mark_tick(orient="horizontal", size=8, thickness=1.5).encode(y="high:Q"))
    layers.append(base.mark_point(filled=True, opacity=1, size=_POINT_AREA).encode(shape=style.shape))
    for state, colour in ((CaseState.WRONG, _WRONG), (CaseState.DIFFERS, _DIFFERS)):
        ringed = [row for row in rows.points if row["state"] == state.value]
        if ringed:
            ring = alt.Chart(alt.Data(values=ringed)).encode(x=x, y=y, color=alt.value(colour))
            layers.append(ring.mark_point(shape="circle", size=_RING_AREA, filled=False, strokeWidth=2, opacity=1))
    return layers


def _failures(rows: ChartRows, style: _Style, x: alt.X, *, at_top: bool) -> list[alt.Chart]:
    """One layer per rank, because an offset in pixels belongs to a mark, not to a row."""
    layers = []
    for rank in sorted({row["rank"] for row in rows.failures}):
        depth = _EDGE + _FAILURE_STEP * rank
        base = alt.Chart(alt.Data(values=[row for row in rows.failures if row["rank"] == rank]))
        base = base.encode(x=x, y=alt.YValue(depth if at_top else alt.ExprRef(f"height - {depth}")))
        points = base.mark_point(filled=False, opacity=1, size=_POINT_AREA, strokeWidth=2)
        layers.append(points.encode(shape=style.shape, color=style.colour))
        texts = base.encode(text="what:N", color=alt.value(_INK))
        # Labels of the longest sequences are on the left, where there is room.
        for condition, align, shift in (("datum.is_longest", "right", -8), ("!datum.is_longest", "left", 8)):
            layers.append(texts.transform_filter(condition).mark_text(align=align, dx=shift, fontSize=14))
    return layers


def _x(lengths: Sequence[int]) -> alt.X:
    domain = [lengths[0] / _LENGTH_MARGIN, lengths[-1] * _LENGTH_MARGIN]
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
    padding = _EDGE + _FAILURE_STEP * failures
    return alt.Y(
        "y:Q",
        title=figure.axis,
        scale=alt.Scale(type="log", domain=[low, high], nice=False, padding=padding),
        axis=alt.Axis(labelExpr=label, gridOpacity=faint, **axis),
    )


def _config() -> dict[str, Any]:
    colours = {"labelColor": _INK, "titleColor": _INK, "gridColor": _INK, "domainColor": _INK, "tickColor": _INK}
    return {
        "background": "white",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": colours | {"titleFontWeight": 500, "labelFontSize": 16, "titleFontSize": 17},
        "legend": {"labelColor": _INK, "labelFontSize": 17, "labelLimit": 420, "rowPadding": 8, "symbolSize": 160},
        "title": {"color": _INK, "subtitleColor": _INK},
    }


def _subtitle(result: BenchResult) -> str:
    parts = [result.environment.get("gpu"), result.environment.get("cpu"), result.date[:10]]
    states = {case.state for case in result.cases}
    if CaseState.WRONG in states:
        parts.append("red ring: wrong outputs")
    if CaseState.DIFFERS in states:
        parts.append("ochre ring: another model, without a requested change")
    return ", ".join(filter(None, parts))


def _domain(values: Sequence[float]) -> tuple[tuple[float, float], float | None]:
    """Ends of a logarithmic axis, and the value that stands for 0: a whole decade below the smallest value."""
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    margin = max(1.0, math.sqrt(_MIN_SPAN * low / high))
    low, high = low / margin, high * margin
    zero = 10.0 ** (math.floor(math.log10(low)) - 1) if len(positive) < len(values) else None
    return (zero or low, high), zero


def _place(case: CaseResult) -> dict[str, Any]:
    return {"series": case.series, "tokens": case.tokens}


def _point(figure: Figure, case: CaseResult, zero: float | None) -> dict[str, Any]:
    high = figure.high(case) if figure.high else None
    return {"y": figure.value(case) or zero or 0.0, "high": high, "state": case.state.value}


def _failure_rows(cases: Sequence[CaseResult], *, longest: int) -> list[dict[str, Any]]:
    ranks: Counter[int] = Counter()
    rows = []
    for case in cases:
        what = "not finite" if case.status is RunStatus.OK else case.status.value
        rows.append(_place(case) | {"what": what, "rank": ranks[case.tokens], "is_longest": case.tokens == longest})
        ranks[case.tokens] += 1
    return rows
