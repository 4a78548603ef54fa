"""How long the rest of a benchmark will take, from what its cases took so far."""

from __future__ import annotations

__all__ = ["RemainingTime"]

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

Case = tuple[str, int, int]
"""Name of the series, batch, tokens."""

_STEEPEST = 2.0
"""Dense attention's cost is quadratic in the length; nothing is steeper."""


class RemainingTime:
    """An estimate of the seconds that are left.

    Args:
        cases: all that will run.
        rounds: of each.
    """

    def __init__(self, cases: Sequence[Case], rounds: int) -> None:
        self._left = dict.fromkeys(cases, rounds)
        self._seconds: dict[Case, list[float]] = defaultdict(list)

    def took(self, case: Case, seconds: float, *, is_over: bool) -> None:
        """A round of a case is done; `is_over` where it will get no other, whatever was planned."""
        self._seconds[case].append(seconds)
        self._left[case] = 0 if is_over else max(0, self._left.get(case, 1) - 1)

    def seconds(self) -> float | None:
        """Of all rounds that are left; None before anything is known."""
        if not self._seconds:
            return None
        return sum(rounds * self._of_round(case) for case, rounds in self._left.items() if rounds)

    def _of_round(self, case: Case) -> float:
        if case in self._seconds:
            return statistics.fmean(self._seconds[case])
        series, batch, tokens = case
        own = self._curve(series)
        if own:
            return _on_curve(own, batch * tokens)
        # Of a series that has not begun, the others are all that is known.
        return statistics.median(_on_curve(self._curve(name), batch * tokens) for name, _, _ in self._seconds)

    def _curve(self, series: str) -> list[tuple[int, float]]:
        """(tokens of the batch, seconds of a round), rising in the tokens."""
        sizes: dict[int, list[float]] = defaultdict(list)
        for (name, batch, tokens), seconds in self._seconds.items():
            if name == series:
                sizes[batch * tokens] += seconds
        return sorted((size, statistics.fmean(seconds)) for size, seconds in sizes.items())


def _on_curve(curve: Sequence[tuple[int, float]], size: int) -> float:
    """Of a size that was not seen: from the nearest that was, as steeply as the two nearest rise.

    Starting a process takes its time, so short texts hardly differ and long ones follow the model; one size alone
    is taken to tell of the latter.
    """
    nearest = sorted(curve, key=lambda seen: abs(seen[0] - size))[:2]
    (near, seconds), *others = nearest
    slope = 1.0 if size > near else 0.0
    if others:
        far, far_seconds = others[0]
        slope = math.log(far_seconds / seconds) / math.log(far / near)
    return float(seconds * (size / near) ** min(max(slope, 0.0), _STEEPEST))
