"""How much a benchmark's latencies vary by themselves, judged from the rounds of its cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdexport.bench.results.result import BenchResult, CaseResult
from hdruntime.optional import require

ASSUMED_SPREAD = 0.03
"""Relative spread of one round, where no case has two: a quiet machine of two shared cores showed it."""

FALSE_ALARMS = 0.01
"""Probability that a comparison of two runs of the same thing shows a change of latency at all."""

_POOLED_WEIGHT = 4
"""Degrees of freedom by which a case's spread is drawn to all cases' spread: two or three rounds alone say little."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of one run.

    Attributes:
        spread: standard deviation of the logarithm of a round's median, over all cases: relative, for small ones.
        degrees: of freedom of `spread`; 0 where it is assumed, because no case has two rounds.
    """

    spread: float
    degrees: int

    @property
    def is_assumed(self) -> bool:
        """Whether the run has no two rounds of any case."""
        return self.degrees == 0

    def variance_of(self, case: CaseResult) -> float:
        """Variance of the mean logarithm of a case's rounds, from all cases' spread or the case's own larger one."""
        logs = _logs(case)
        own = (_POOLED_WEIGHT * self.spread**2 + _squares(logs)) / (_POOLED_WEIGHT + len(logs) - 1)
        # Never from less than all cases have: rounds that agree by chance would make the next one a change.
        return max(own, self.spread**2) / len(logs)


def noise_of(result: BenchResult) -> Noise:
    """The noise of a run, pooled over its cases, so that few rounds of each suffice."""
    rounds = [logs for case in result.cases if len(logs := _logs(case)) > 1]
    degrees = sum(len(logs) - 1 for logs in rounds)
    if degrees == 0:
        return Noise(spread=ASSUMED_SPREAD, degrees=0)
    return Noise(spread=math.sqrt(sum(map(_squares, rounds)) / degrees), degrees=degrees)


def threshold(comparisons: int, degrees: int) -> float:
    """Standard errors that a difference has to exceed, so that all together rarely give a false alarm.

    Bonferroni's correction of Student's t.

    Args:
        comparisons: how many differences are looked at.
        degrees: of freedom of the noise; 0 where it is assumed, and the normal distribution is used.

    Raises:
        MissingDependencyError: SciPy is not installed.
    """
    quantile = require("scipy.stats").t.isf(FALSE_ALARMS / (2 * max(comparisons, 1)), degrees or math.inf)
    return float(quantile)


def _logs(case: CaseResult) -> list[float]:
    return [] if case.latency is None else [math.log(p50_ms) for p50_ms in case.latency.rounds_p50_ms]


def _squares(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)
