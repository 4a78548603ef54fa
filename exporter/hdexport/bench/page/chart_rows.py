"""The rows of data that a chart draws, and the axis that fits them."""

from __future__ import annotations

__all__ = ["ChartRows", "chart_rows"]

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hdexport.bench.page.axes import Scale, failure_place, scale_of
from hdexport.bench.page.figures import Figure
from hdexport.bench.results.figure_text import case_state
from hdexport.bench.results.result import BenchResult, CaseResult, Status


@dataclass(frozen=True, kw_only=True)
class ChartRows:
    """What a chart draws.

    Attributes:
        points: a row a case that has the figure: ``i`` is the number of its series, ``y`` where its value stands,
            ``high`` the end of its whisker, ``is_wrong`` whether its answer is, ``detail_0``, ... what `labels` names.
        failures: a row a case that has none: ``y`` a place at the edge, ``what`` happened, the ``reason``,
            ``is_longest`` whether its texts are the longest.
        labels: of the details.
        scale: the y axis.
    """

    points: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    labels: list[str]
    scale: Scale


def chart_rows(result: BenchResult, figure: Figure, batch: int) -> ChartRows | None:
    """The rows of one chart; None where no case of the batch size has that figure."""
    cases = [case for case in result.cases if case.batch == batch]
    with_value = [case for case in cases if figure.value(case) is not None]
    if not with_value:
        return None
    points = [case for case in with_value if math.isfinite(figure.value(case) or 0.0)]
    failures = [case for case in cases if case.status is not Status.OK or (case in with_value and case not in points)]
    names = [series.name for series in result.series]
    deepest = max(Counter(case.tokens for case in failures).values(), default=0)
    scale = scale_of(
        _values(figure, points),
        is_log=figure.is_log,
        tick_format=figure.tick_format,
        failures=deepest,
        fails_high=figure.fails_high,
    )
    labels = list(dict.fromkeys(label for case in points for label in figure.details(case)))
    return ChartRows(
        points=[_point(figure, case, names, labels, scale) for case in points],
        failures=_failures(figure, failures, names, scale, longest=result.lengths[-1]),
        labels=labels,
        scale=scale,
    )


def _values(figure: Figure, cases: Sequence[CaseResult]) -> list[float]:
    values = [figure.value(case) for case in cases]
    highs = [] if figure.high is None else [figure.high(case) for case in cases]
    return [value for value in (*values, *highs) if value is not None]


def _place(case: CaseResult, names: Sequence[str]) -> dict[str, Any]:
    return {"i": names.index(case.series), "series": case.series, "tokens": case.tokens, "batch": case.batch}


def _point(
    figure: Figure, case: CaseResult, names: Sequence[str], labels: Sequence[str], scale: Scale
) -> dict[str, Any]:
    value, high = figure.value(case), figure.high(case) if figure.high else None
    assert value is not None
    details = figure.details(case)
    state = case_state(case)
    return {
        **_place(case, names),
        "y": scale.place(value),
        "high": None if high is None else scale.place(high),
        "is_wrong": state == "wrong",
        "answer": "WRONG" if state == "wrong" else "not compared" if case.error is None else "within tolerance",
        # Plain names: labels have spaces and slashes, which are operators in Vega's expressions.
        **{f"detail_{n}": details.get(label, "") for n, label in enumerate(labels)},
    }


def _failures(
    figure: Figure, cases: Sequence[CaseResult], names: Sequence[str], scale: Scale, *, longest: int
) -> list[dict[str, Any]]:
    """What has no value, at the chart's edge; several of one length stand one behind the other."""
    ranks: Counter[int] = Counter()
    rows = []
    for case in cases:
        what = "not finite" if case.status is Status.OK else case.status.value
        place = failure_place(scale, ranks[case.tokens], at_top=figure.fails_high)
        row = {"y": place, "what": what, "reason": case.reason or "", "is_longest": case.tokens == longest}
        rows.append(_place(case, names) | row)
        ranks[case.tokens] += 1
    return rows
