"""Changes between two benchmarks beyond the noise, and facts about which either run has no word."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hdexport.bench.results.figure_text import case_state
from hdexport.bench.results.noise import Noise, noise_of, threshold
from hdexport.bench.results.result import BenchResult, CaseResult

Case = tuple[str, int, int]
"""Name of the series, batch, tokens."""

LEAST_LATENCY = 1.02
"""A smaller ratio of latencies does not matter, however certain it is."""

LEAST_MEMORY = 1.05
LEAST_MEMORY_BYTES = 16_000_000
"""Memory changed if both its ratio and its difference exceed these: allocators round up."""

LEAST_ERROR = 2.0
LEAST_ERROR_SIZE = 1e-6
"""Errors changed if their ratio exceeds this and the larger one that: below is the rounding of float32."""

_LEAST_PEER_CASES = 3
"""Fewest cases of peers in both runs whose median is taken as the machine's drift."""

_LEGITIMATE = ("commit", "hdexport", "gpu clock", "gpu memory clock")
"""Parts of the environment that may differ without the peers being others."""


class ChangeKind(str, Enum):
    """The figure of a case that changed."""

    STATUS = "status"
    LATENCY = "latency"
    MEMORY = "memory"
    GROWTH = "memory added by the batch"
    ERROR = "error"
    LARGEST_BATCH = "largest batch"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one case that is another than before.

    Attributes:
        case: which.
        kind: which figure.
        before: its value, in ms, bytes or as it is; of a status, its name.
        after: likewise.
        ratio: after over before, the drift divided out of latencies; None of a status, and where before is 0.
        standard_error: of the logarithm of that ratio; None where the figure has no noise.
    """

    case: Case
    kind: ChangeKind
    before: float | str
    after: float | str
    ratio: float | None = None
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A change that all cases have in common: the machine's, or of something that they all share.

    Attributes:
        ratio: median of latency after over latency before.
        standard_error: of its logarithm.
        cases: of how many.
        is_divided_out: whether the drift is of peers whose software did not change: it is the machine's, and ratios of
            latencies are given without it.
    """

    ratio: float
    standard_error: float
    cases: int
    is_divided_out: bool


@dataclass(frozen=True, kw_only=True)
class ResultComparison:
    """The comparison of two benchmarks.

    Attributes:
        changes: beyond the noise; statuses first, then as in the table.
        compared: cases that both have.
        before_noise: of the rounds of the first.
        after_noise: of the second.
        drift: None where no case has a latency in both.
        environment: (name, before, after) of each difference; None where one lacks it.
        only_before: cases of the first alone.
        only_after: cases of the second alone.
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
    """Compare two runs case by case.

    A latency changed if the means of the logarithms of its rounds differ by more than their noise explains
    (`hdexport.bench.results.noise`) and by more than `LEAST_LATENCY`.
    """
    was, now = _by_case(before), _by_case(after)
    both = [case for case in was if case in now]
    noises = noise_of(before), noise_of(after)
    latencies = [_latency_pair(case, was[case], now[case], noises) for case in both]
    known = [pair for pair in latencies if pair is not None]
    environment = tuple(_environment(before, after))
    drift = _drift(known, _peers(before, after), environment)
    changes = [
        *(change for case in both for change in _status_changes(case, was[case], now[case])),
        *_latency_changes(known, drift, degrees=noises[0].degrees + noises[1].degrees),
        *(change for case in both for change in _other_changes(case, was[case], now[case])),
        *_largest_batch_changes(before, after),
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


class _LatencyPair(NamedTuple):
    """One case's latency in both runs; `log_ratio` of the geometric means of the rounds, with its variance."""

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


def _peers(before: BenchResult, after: BenchResult) -> set[str]:
    return {series.name for result in (before, after) for series in result.series if series.is_peer}


def _drift(
    pairs: Sequence[_LatencyPair], peers: set[str], environment: Sequence[tuple[str, str | None, str | None]]
) -> Drift | None:
    of_peers = [pair for pair in pairs if pair.case[0] in peers]
    is_same_software = all(name in _LEGITIMATE for name, _, _ in environment)
    is_divided_out = len(of_peers) >= _LEAST_PEER_CASES and is_same_software
    used = of_peers if is_divided_out else pairs
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
    was, now = case_state(before), case_state(after)
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


def _largest_batch_changes(before: BenchResult, after: BenchResult) -> Iterator[Change]:
    was = {(found.series, found.tokens, found.budget_bytes): found.batch for found in before.largest_batches}
    for found in after.largest_batches:
        batch = was.get((found.series, found.tokens, found.budget_bytes))
        case = (found.series, found.batch, found.tokens)
        yield from _change(case, ChangeKind.LARGEST_BATCH, batch, found.batch, factor=LEAST_MEMORY)


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
    """A change, if the values differ by more than a factor and a difference, and the larger exceeds a size."""
    if before is None or after is None:
        return
    less, more = sorted((before, after))
    if more > less * factor and more - less > difference and more > size:
        yield Change(case=case, kind=kind, before=before, after=after, ratio=after / before if before else None)
