"""The axes of a chart: room at the edges, ticks at round numbers, and a place for what has no logarithm."""

from __future__ import annotations

__all__ = ["Scale", "failure_place", "lengths_domain", "scale_of"]

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

_MARGIN = 0.06
"""Room between the outermost values and the edges, as a fraction of the axis."""

_FAILURE_EDGE = 0.04
_FAILURE_STEP = 0.07
"""Where the first mark of a failure stands, and how far apart they are, as fractions of the axis."""

_ZERO_ROOM = 0.1
"""Between 0 and the least other value of a logarithmic axis, as a fraction of it."""

_FEWEST_DECADES = 0.5
"""That a logarithmic axis spans: less would make noise look like a trend."""

_MOST_TICKS = 7


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A y axis.

    Attributes:
        low: the lower end of the axis.
        high: the upper end.
        zero: where 0 stands on a logarithmic axis that has to show it, near its lower end; else None.
        ticks: that are labelled.
        tick_format: d3's.
        is_log: whether it is logarithmic.
    """

    low: float
    high: float
    zero: float | None
    ticks: tuple[float, ...]
    tick_format: str
    is_log: bool

    def place(self, value: float) -> float:
        """Where a value is drawn: at itself, but for 0."""
        return self.zero if self.zero is not None and value <= 0 else value

    def at(self, fraction: float) -> float:
        """The value that far up the axis."""
        if self.is_log:
            return self.low * (self.high / self.low) ** fraction
        return self.low + (self.high - self.low) * fraction

    def altair(self) -> alt.Scale:
        """For a chart."""
        return alt.Scale(type="log" if self.is_log else "linear", domain=[self.low, self.high], nice=False)

    def axis(self) -> alt.Axis:
        """For a chart."""
        label = f"replace(format(datum.value, '{self.tick_format}'), 'e+0', '')"
        if self.zero is not None:
            label = f"datum.value < {self.zero * 1.001!r} ? '0' : {label}"
        zero = () if self.zero is None else (self.zero,)
        return alt.Axis(values=[*zero, *self.ticks], labelExpr=label, labelOverlap=False)


def scale_of(
    values: Sequence[float], *, is_log: bool, tick_format: str, failures: int = 0, fails_high: bool = True
) -> Scale:
    """An axis for values of at least 0; both its ends leave room for marks.

    Args:
        values: that it has to show; none of them gives an axis from 1 to 10, or from 0 to 1.
        is_log: logarithmic, with 0 below all others if it is among the values; otherwise from 0.
        tick_format: d3's.
        failures: marks of failures that stand one behind the other, at most.
        fails_high: whether at the upper end; at the lower otherwise, where only a logarithmic axis leaves them room.
    """
    positive = [value for value in values if value > 0]
    edge = _FAILURE_EDGE + _FAILURE_STEP * failures if failures else 0.0
    if not is_log:
        high = max(positive, default=1.0) * 1.12
        return Scale(low=0.0, high=high, zero=None, ticks=_linear_ticks(high), tick_format=tick_format, is_log=False)
    low, high = math.log10(min(positive, default=1.0)), math.log10(max(positive, default=10.0))
    if high - low < _FEWEST_DECADES:
        middle = (low + high) / 2
        low, high = middle - _FEWEST_DECADES / 2, middle + _FEWEST_DECADES / 2
    has_zero = len(positive) < len(values)
    # 0 stands well below the least value, so that nobody takes it for a little less than that.
    below = _MARGIN + (_ZERO_ROOM if has_zero else 0.0) + (0.0 if fails_high else edge)
    above = _MARGIN + (edge if fails_high else 0.0)
    length = (high - low) / (1 - below - above)
    bottom, top = low - below * length, high + above * length
    return Scale(
        low=10**bottom,
        high=10**top,
        zero=10 ** (low - _ZERO_ROOM * length) if has_zero else None,
        ticks=_log_ticks(10 ** (low - _MARGIN * length), 10 ** (high + _MARGIN * length)),
        tick_format=tick_format,
        is_log=True,
    )


def failure_place(scale: Scale, rank: int, *, at_top: bool) -> float:
    """Where a case without a value stands: at an edge, the next ones of its length behind it."""
    depth = _FAILURE_EDGE + _FAILURE_STEP * rank
    return scale.at(1 - depth if at_top else depth)


def lengths_domain(lengths: Sequence[int]) -> tuple[float, float]:
    """Ends of a logarithmic axis of lengths."""
    low, high = math.log2(lengths[0]), math.log2(lengths[-1])
    span = max(high - low, 1.0)
    return 2 ** (low - _MARGIN * span), 2 ** (high + _MARGIN * span)


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten; of those only as many as are readable."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{digit}e{exponent}") for exponent in exponents for digit in digits]
        inside = tuple(tick for tick in ticks if low <= tick <= high)
        if len(inside) <= _MOST_TICKS:
            return inside
    return inside[:: math.ceil(len(inside) / _MOST_TICKS)]


def _linear_ticks(high: float) -> tuple[float, ...]:
    for step in (10.0**exponent * digit for exponent in range(-6, 6) for digit in (1, 2, 5)):
        if high / step <= _MOST_TICKS:
            return tuple(round(n * step, 9) for n in range(int(high / step) + 1))
    return (0.0,)
