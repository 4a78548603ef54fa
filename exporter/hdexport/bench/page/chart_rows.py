"""The rows of data that a chart draws, and the range of its y axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdexport.bench.page.figures import Figure
from hdexport.bench.results.figure_text import case_state
from hdexport.bench.results.result import BenchResult, CaseResult, Status

_LEAST_FACTOR = 3.0
"""Least factor that a logarithmic axis spans: a smaller one would make noise look like a trend."""


@dataclass(frozen=True, kw_only=True)
class ChartRows:
    """The rows that a chart draws.

    Attributes:
        points: one row per case with the figure: ``i`` is the number of its series, ``y`` where its value stands,
            ``high`` the end of its whisker, ``is_wrong`` whether its answer is wrong, ``detail_0``, ... the `labels`.
        failures: one row per case without it: ``what`` happened, the ``reason``, ``rank`` among failures of its length,
            ``is_longest`` whether its texts are the longest.
        labels: of the details.
        domain: ends of the y axis, as far as values go.
        zero: where 0 stands on a logarithmic axis that has to show it; None if there is no 0.
    """

    points: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    labels: list[str]
    domain: tuple[float, float]
    zero: float | None


def chart_rows(result: BenchResult, figure: Figure, batch: int) -> ChartRows | None:
    """The rows of one chart; None if no case of the batch size has that figure."""
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
        failures=_failures(failures, indices, longest=result.lengths[-1]),
        labels=labels,
        domain=domain,
        zero=zero,
    )


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


def _failures(cases: Sequence[CaseResult], indices: Mapping[str, int], *, longest: int) -> list[dict[str, Any]]:
    ranks: Counter[int] = Counter()
    rows = []
    for case in cases:
        what = "not finite" if case.status is Status.OK else case.status.value
        row = {"what": what, "reason": case.reason or "", "rank": ranks[case.tokens]}
        rows.append(_place(case, indices) | row | {"is_longest": case.tokens == longest})
        ranks[case.tokens] += 1
    return rows
