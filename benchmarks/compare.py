"""Compare two results of `hdexport bench`: changes beyond their noise, and differences of their environments.

Usage: python -m benchmarks.compare BEFORE/bench.json AFTER/bench.json [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from benchmarks.command import exit_with
from hdexport.bench.results.files import read_result
from hdexport.bench.results.formatting import bytes_text, ms_text, number_text
from hdexport.bench.results.result import BenchResult, CaseResult

Case = tuple[str, int, int]
"""Name of the series, batch, tokens."""

LEAST_LATENCY = 1.02
"""A smaller ratio of latencies does not matter, however certain it is."""

LEAST_MEMORY = 1.05
LEAST_MEMORY_BYTES = 16_000_000
"""Memory changed if both its ratio and its difference exceed these, because allocators round up."""

LEAST_ERROR = 2.0
LEAST_ERROR_SIZE = 1e-6
"""Errors changed if their ratio exceeds the first and the larger one exceeds the second: smaller errors are rounding of
float32."""

_LEAST_PEER_CASES = 3
"""Fewest cases of baselines in both runs whose median counts as the machine's drift."""

_LEGITIMATE = ("commit", "hdexport", "gpu clock", "gpu memory clock")
"""Conditions that may differ while the baselines' software and the machine count as the same."""

ASSUMED_SPREAD = 0.03
"""Relative spread of one round where no case has two rounds; measured on a quiet machine of two shared cores."""

FALSE_ALARMS = 0.01
"""Probability that comparing two runs of the same thing shows any change of latency."""

_POOLED_WEIGHT = 4
"""Weight of all cases' spread in a case's own spread, in degrees of freedom: two or three rounds alone say little."""

_FEWEST_PERCENT = 2.0
"""A smaller drift is not reported."""


class ChangeKind(StrEnum):
    """The figure of a case that changed."""

    STATUS = "status"
    LATENCY = "latency"
    MEMORY = "memory"
    GROWTH = "memory added by the batch"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one case that changed.

    Attributes:
        before: in ms or bytes; the name of a status.
        ratio: after over before; latencies are divided by the drift first. None for statuses, and where `before` is 0.
        standard_error: of the logarithm of `ratio`; None for figures without noise.
    """

    case: Case
    kind: ChangeKind
    before: float | str
    after: float | str
    ratio: float | None = None
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A change that all cases share: the machine's, or that of something they all use.

    Attributes:
        ratio: median of latency after over latency before.
        standard_error: of its logarithm.
        cases: number of cases in the median.
        is_divided_out: whether the drift is that of baselines whose software did not change. Then it is the machine's,
            and ratios of latencies are given without it.
    """

    ratio: float
    standard_error: float
    cases: int
    is_divided_out: bool


@dataclass(frozen=True, kw_only=True)
class ResultComparison:
    """The comparison of two benchmarks.

    Attributes:
        changes: beyond the noise; statuses first, then in the order of the table.
        compared: number of cases that both runs have.
        drift: None where no case has a latency in both runs.
        environment: (name, before, after) of each difference; None where a run lacks the name.
    """

    changes: tuple[Change, ...]
    compared: int
    before_noise: Noise
    after_noise: Noise
    drift: Drift | None
    environment: tuple[tuple[str, str | None, str | None], ...]
    only_before: tuple[Case, ...]
    only_after: tuple[Case, ...]


def compare_results(before: BenchResult, after: BenchResult) -> ResultComparison:
    """Compares two runs case by case. A latency changed if the means of the logarithms of its rounds differ by more
    than their noise explains, and by more than `LEAST_LATENCY`."""
    was, now = _by_case(before), _by_case(after)
    both = [case for case in was if case in now]
    noises = noise_of(before), noise_of(after)
    latencies = [_latency_pair(case, was[case], now[case], noises) for case in both]
    known = [pair for pair in latencies if pair is not None]
    environment = tuple(_environment(before, after))
    baselines = {series.name for result in (before, after) for series in result.series if series.is_baseline}
    drift = _drift(known, baselines, environment)
    changes = [
        *(change for case in both for change in _status_changes(case, was[case], now[case])),
        *_latency_changes(known, drift, degrees=noises[0].degrees + noises[1].degrees),
        *(change for case in both for change in _other_changes(case, was[case], now[case])),
    ]
    return ResultComparison(
        changes=tuple(changes),
        compared=len(both),
        before_noise=noises[0],
        after_noise=noises[1],
        drift=drift,
        environment=environment,
        only_before=tuple(case for case in was if case not in now),
        only_after=tuple(case for case in now if case not in was),
    )


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How much latencies of one run vary by themselves.

    Attributes:
        spread: standard deviation of the logarithm of a round's median over all cases; nearly a relative one.
        degrees: degrees of freedom of `spread`; 0 where it is assumed, because no case has two rounds.
    """

    spread: float
    degrees: int

    @property
    def is_assumed(self) -> bool:
        """Whether no case of the run has two rounds."""
        return self.degrees == 0

    def variance_of(self, case: CaseResult) -> float:
        """Variance of the mean logarithm of a case's rounds: from all cases' spread, or from the case's own if that is
        larger."""
        logs = _logs(case)
        own = (_POOLED_WEIGHT * self.spread**2 + _squares(logs)) / (_POOLED_WEIGHT + len(logs) - 1)
        # At least all cases' spread: where rounds agree by chance, the next one would seem a change.
        return max(own, self.spread**2) / len(logs)


def noise_of(result: BenchResult) -> Noise:
    """The noise of a run, pooled over its cases, so that few rounds per case suffice."""
    rounds = [logs for case in result.cases if len(logs := _logs(case)) > 1]
    degrees = sum(len(logs) - 1 for logs in rounds)
    if degrees == 0:
        return Noise(spread=ASSUMED_SPREAD, degrees=0)
    return Noise(spread=math.sqrt(sum(map(_squares, rounds)) / degrees), degrees=degrees)


def threshold(comparisons: int, degrees: int) -> float:
    """How many standard errors a difference must exceed so that `comparisons` differences together rarely give a false
    alarm: Student's t with Bonferroni's correction. With 0 degrees of freedom, for assumed noise, it is the normal
    distribution's."""
    return float(stats.t.isf(FALSE_ALARMS / (2 * max(comparisons, 1)), degrees or math.inf))


def comparison_lines(comparison: ResultComparison) -> list[str]:
    """The lines that the command prints: remarks first, then one line per change."""
    return [
        *_environment_lines(comparison),
        *_noise_lines(comparison),
        *_drift_lines(comparison),
        *_case_lines("only in the first", comparison.only_before),
        *_case_lines("only in the second", comparison.only_after),
        *(_change_line(change) for change in comparison.changes),
        _summary_line(comparison),
    ]


class _LatencyPair(NamedTuple):
    """One case's latency in both runs; `log_ratio` is that of the geometric means of the rounds."""

    case: Case
    before_ms: float
    after_ms: float
    log_ratio: float
    variance: float


def _latency_pair(
    case: Case, before: CaseResult, after: CaseResult, noises: tuple[Noise, Noise]
) -> _LatencyPair | None:
    if before.latency is None or after.latency is None:
        return None
    was, now = (statistics.geometric_mean(latency.rounds_p50_ms) for latency in (before.latency, after.latency))
    variance = noises[0].variance_of(before) + noises[1].variance_of(after)
    return _LatencyPair(case, before.latency.p50_ms, after.latency.p50_ms, math.log(now / was), variance)


def _by_case(result: BenchResult) -> dict[Case, CaseResult]:
    return {(case.series, case.batch, case.tokens): case for case in result.cases}


def _environment(before: BenchResult, after: BenchResult) -> Iterator[tuple[str, str | None, str | None]]:
    for name in dict.fromkeys([*before.environment, *after.environment]):
        was, now = before.environment.get(name), after.environment.get(name)
        if was != now:
            yield name, was, now


def _drift(
    pairs: Sequence[_LatencyPair], baselines: set[str], environment: Sequence[tuple[str, str | None, str | None]]
) -> Drift | None:
    of_baselines = [pair for pair in pairs if pair.case[0] in baselines]
    is_same_software = all(name in _LEGITIMATE for name, _, _ in environment)
    is_divided_out = len(of_baselines) >= _LEAST_PEER_CASES and is_same_software
    used = of_baselines if is_divided_out else pairs
    if not used:
        return None
    # The median's variance is pi/2 the mean's, for normal noise.
    variance = math.pi / 2 * statistics.fmean(pair.variance for pair in used) / len(used)
    return Drift(
        ratio=math.exp(statistics.median(pair.log_ratio for pair in used)),
        standard_error=math.sqrt(variance),
        cases=len(used),
        is_divided_out=is_divided_out,
    )


def _status_changes(case: Case, before: CaseResult, after: CaseResult) -> Iterator[Change]:
    was, now = before.state.value, after.state.value
    if was != now:
        yield Change(case=case, kind=ChangeKind.STATUS, before=was, after=now)


def _latency_changes(pairs: Sequence[_LatencyPair], drift: Drift | None, *, degrees: int) -> Iterator[Change]:
    limit = threshold(len(pairs), degrees)
    is_divided_out = drift is not None and drift.is_divided_out
    common, common_error = (math.log(drift.ratio), drift.standard_error) if drift and is_divided_out else (0.0, 0.0)
    for pair in pairs:
        log_ratio, error = pair.log_ratio - common, math.hypot(math.sqrt(pair.variance), common_error)
        if abs(log_ratio) > max(limit * error, math.log(LEAST_LATENCY)):
            yield Change(
                case=pair.case,
                kind=ChangeKind.LATENCY,
                before=pair.before_ms,
                after=pair.after_ms,
                ratio=math.exp(log_ratio),
                standard_error=error,
            )


def _other_changes(case: Case, before: CaseResult, after: CaseResult) -> Iterator[Change]:
    memory = {"factor": LEAST_MEMORY, "difference": LEAST_MEMORY_BYTES}
    for kind, part, figure, least in (
        (ChangeKind.MEMORY, "memory", "peak_bytes", memory),
        (ChangeKind.GROWTH, "memory", "growth_bytes", memory),
        (ChangeKind.ERROR, "error", "max_abs_error", {"factor": LEAST_ERROR, "size": LEAST_ERROR_SIZE}),
    ):
        was, now = (getattr(getattr(each, part), figure, None) for each in (before, after))
        yield from _change(case, kind, was, now, **least)


def _change(
    case: Case,
    kind: ChangeKind,
    before: float | None,
    after: float | None,
    *,
    factor: float,
    difference: float = 0.0,
    size: float = 0.0,
) -> Iterator[Change]:
    """A change if the values differ by more than a factor and a difference, and the larger one exceeds a size."""
    if before is None or after is None:
        return
    less, more = sorted((before, after))
    if more > less * factor and more - less > difference and more > size:
        yield Change(case=case, kind=kind, before=before, after=after, ratio=after / before if before else None)


def _logs(case: CaseResult) -> list[float]:
    return [] if case.latency is None else [math.log(p50_ms) for p50_ms in case.latency.rounds_p50_ms]


def _squares(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _environment_lines(comparison: ResultComparison) -> Iterator[str]:
    for name, before, after in comparison.environment:
        yield f"{name}: {before or 'not recorded'} -> {after or 'not recorded'}"


def _noise_lines(comparison: ResultComparison) -> Iterator[str]:
    def spread(noise: Noise) -> str:
        return f"{noise.spread:.1%}" + (" (assumed: it has one round)" if noise.is_assumed else "")

    yield f"spread of a round: {spread(comparison.before_noise)} -> {spread(comparison.after_noise)}"
    if comparison.before_noise.is_assumed or comparison.after_noise.is_assumed:
        yield "one round does not show the noise; measure with --rounds 3 or more"


def _drift_lines(comparison: ResultComparison) -> Iterator[str]:
    drift = comparison.drift
    if drift is None:
        return
    if drift.is_divided_out:
        yield (
            f"the baselines took {number_text(drift.ratio)} times as long (median of {drift.cases} cases): this is "
            "attributed to the machine and divided out of the ratios below"
        )
    elif abs(drift.ratio - 1) * 100 > _FEWEST_PERCENT:
        yield (
            f"all cases together took {number_text(drift.ratio)} times as long (median of {drift.cases}): without "
            "unchanged baselines it is unknown whether that is the machine or code that they share"
        )


def _case_lines(where: str, cases: tuple[Case, ...]) -> Iterator[str]:
    for series in dict.fromkeys(series for series, _, _ in cases):
        shapes = ", ".join(f"{batch} x {tokens}" for name, batch, tokens in cases if name == series)
        yield f"{where}: {series} at {shapes}"


def _change_line(change: Change) -> str:
    series, batch, tokens = change.case
    where = f"{series}, {batch} x {tokens}"
    noise = "" if change.standard_error is None else f", noise {change.standard_error:.1%}"
    ratio = "" if change.ratio is None else f" ({number_text(change.ratio)}x{noise})"
    return f"{where}: {change.kind.value} {_text(change, change.before)} -> {_text(change, change.after)}{ratio}"


def _text(change: Change, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if change.kind is ChangeKind.LATENCY:
        return ms_text(value)
    if change.kind in (ChangeKind.MEMORY, ChangeKind.GROWTH):
        return bytes_text(int(value))
    return f"{value:.2g}" if change.kind is ChangeKind.ERROR else f"{value:g}"


def _summary_line(comparison: ResultComparison) -> str:
    changed = len({change.case for change in comparison.changes})
    if not comparison.compared:
        return "the two results have no case in common"
    if not changed:
        return f"nothing changed beyond the noise in {comparison.compared} cases"
    return f"{len(comparison.changes)} changes in {changed} of {comparison.compared} cases"


def main() -> int:
    """Print the changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    comparison = compare_results(read_result(options.before), read_result(options.after))
    lines = comparison_lines(comparison)
    print(json.dumps(dataclasses.asdict(comparison), indent=2) if options.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    exit_with(main)
