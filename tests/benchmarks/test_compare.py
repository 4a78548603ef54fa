"""A comparison of two benchmarks finds what changed, says little of what did not, and names what it cannot tell."""

from __future__ import annotations

import dataclasses

import pytest
from scipy import stats

from benchmarks.compare import (
    ASSUMED_SPREAD,
    FALSE_ALARMS,
    ChangeKind,
    ResultComparison,
    compare_results,
    comparison_lines,
    noise_of,
    threshold,
)
from hdexport.bench.results.result import BenchResult, CaseResult, RunStatus, Series
from support.sample_results import MEASURED, OURS, PLAIN, TORCH, sample_result, slower, with_cases

SEEDS = 60


def without_baselines(result: BenchResult) -> BenchResult:
    series: list[Series] = [dataclasses.replace(series, is_baseline=False) for series in result.series]
    return dataclasses.replace(result, series=tuple(series))


def changed(comparison: ResultComparison, kind: ChangeKind = ChangeKind.LATENCY) -> set[str]:
    return {change.case[0] for change in comparison.changes if change.kind is kind}


def pairs(*, rounds: int = 3, noise: float = 0.015) -> list[tuple[BenchResult, BenchResult]]:
    """Runs of the same thing."""
    return [
        (
            sample_result(seed=2 * seed, rounds=rounds, noise=noise, lengths=(1024, 4096)),
            sample_result(seed=2 * seed + 1, rounds=rounds, noise=noise, lengths=(1024, 4096)),
        )
        for seed in range(SEEDS)
    ]


@pytest.mark.parametrize(("rounds", "noise"), [(3, 0.015), (3, 0.1)])
def test_two_runs_of_the_same_thing_rarely_differ(rounds: int, noise: float) -> None:
    alarms = sum(bool(compare_results(*pair).changes) for pair in pairs(rounds=rounds, noise=noise))
    # More than that is what 1 % of false alarms gives once in two thousand times.
    assert alarms <= stats.binom.isf(5e-4, SEEDS, FALSE_ALARMS)


def test_ten_percent_are_found_in_every_case_from_three_rounds() -> None:
    found = [compare_results(before, slower(after, 1.1, OURS)) for before, after in pairs()]
    cases = [change for comparison in found for change in comparison.changes if change.kind is ChangeKind.LATENCY]
    assert {change.case[0] for change in cases} == {OURS}
    assert len(cases) >= 0.97 * SEEDS * 4  # two lengths, two batches


def test_a_slower_machine_is_distinguished_from_a_slower_model() -> None:
    before, after = pairs()[0]
    comparison = compare_results(before, slower(slower(after, 1.2, *MEASURED), 1.15, OURS))
    assert changed(comparison) == {OURS}
    assert comparison.drift is not None
    assert comparison.drift.ratio == pytest.approx(1.2, rel=0.03)
    ratios = [change.ratio for change in comparison.changes]
    assert ratios == pytest.approx([1.15] * len(ratios), rel=0.06)
    assert any("the baselines took 1.2" in line for line in comparison_lines(comparison))


@pytest.mark.parametrize("why", ["no baselines", "a baseline's software changed"])
def test_without_baselines_that_stayed_the_same_nothing_is_explained_away(why: str) -> None:
    before, after = pairs()[0]
    after = slower(after, 1.2, *MEASURED)
    if why == "no baselines":
        before, after = without_baselines(before), without_baselines(after)
    else:
        after = dataclasses.replace(after, environment={**after.environment, "torch": "2.14.0"})
    comparison = compare_results(before, after)
    assert changed(comparison) == set(MEASURED)
    assert comparison.drift is not None
    assert not comparison.drift.is_divided_out
    assert any("it is unknown whether" in line for line in comparison_lines(comparison))


def test_one_round_is_reported_and_assumes_the_documented_noise() -> None:
    before, after = (sample_result(seed=seed, rounds=1, noise=0.001) for seed in (1, 2))
    assert noise_of(before).spread == ASSUMED_SPREAD
    comparison = compare_results(before, slower(after, 1.08, OURS))
    assert not comparison.changes
    assert any("assumed" in line for line in comparison_lines(comparison))
    assert any("--rounds 3" in line for line in comparison_lines(comparison))
    assert changed(compare_results(before, slower(after, 1.3, OURS))) == {OURS}


@pytest.mark.parametrize(("comparisons", "degrees"), [(1, 8), (60, 1)])
def test_the_threshold_is_students(comparisons: int, degrees: int) -> None:
    exact = stats.t.isf(FALSE_ALARMS / (2 * comparisons), degrees)
    assert threshold(comparisons, degrees) == pytest.approx(exact)
    assert threshold(comparisons, 0) == pytest.approx(stats.norm.isf(FALSE_ALARMS / (2 * comparisons)))


def test_memory_and_error_and_answers_and_statuses_are_compared() -> None:
    before = sample_result()

    def change(case: CaseResult) -> CaseResult:
        if (case.series, case.batch, case.tokens) == (OURS, 8, 8192):
            return CaseResult(series=OURS, batch=8, tokens=8192, status=RunStatus.OUT_OF_MEMORY, reason="too much")
        if (case.series, case.batch, case.tokens) == (PLAIN, 8, 4096) and case.memory and case.memory.rss_bytes:
            memory = dataclasses.replace(case.memory, rss_bytes=2 * case.memory.rss_bytes)
            return dataclasses.replace(case, memory=memory)
        if case.series == TORCH and case.tokens == 512 and case.error:
            return dataclasses.replace(case, error=dataclasses.replace(case.error, max_abs_error=0.5, passed=False))
        if case.series == OURS and case.error and case.error.max_abs_error:
            factor = {512: 1.5, 1024: 3.0}.get(case.tokens, 1.0)  # of which only the second is a change
            error = dataclasses.replace(case.error, max_abs_error=factor * case.error.max_abs_error)
            return dataclasses.replace(case, error=error)
        return case

    comparison = compare_results(before, with_cases(before, change))
    found = {(change.kind, *change.case): (change.before, change.after) for change in comparison.changes}
    assert found[ChangeKind.STATUS, OURS, 8, 8192] == ("ok", "OOM")
    assert found[ChangeKind.STATUS, TORCH, 1, 512] == ("ok", "wrong")
    assert found[ChangeKind.ERROR, TORCH, 8, 512] == (0.0, 0.5)
    assert (ChangeKind.MEMORY, PLAIN, 8, 4096) in found
    assert {(ChangeKind.ERROR, OURS, batch, 1024) for batch in (1, 8)} <= found.keys()
    assert len(found) == 1 + 2 + 2 + 1 + 2
    lines = "\n".join(comparison_lines(comparison))
    assert f"{OURS}, 8 x 8192: status ok -> OOM" in lines
    assert "8 changes in 6 of 50 cases" in lines
