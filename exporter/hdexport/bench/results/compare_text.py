"""A comparison of two benchmarks in lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from hdexport.bench.results.compare import Case, Change, ChangeKind, ResultComparison
from hdexport.bench.results.figure_text import bytes_text, ms_text, number_text
from hdexport.bench.results.noise import Noise

_FEWEST_PERCENT = 2.0
"""A smaller drift is not reported."""


def comparison_lines(comparison: ResultComparison) -> list[str]:
    """The lines that the command prints: remarks first, then one line per change."""
    return [
        *_environment(comparison),
        *_noise(comparison),
        *_drift(comparison),
        *_cases("only in the first", comparison.only_before),
        *_cases("only in the second", comparison.only_after),
        *(_line(change) for change in comparison.changes),
        _summary(comparison),
    ]


def _environment(comparison: ResultComparison) -> Iterator[str]:
    for name, before, after in comparison.environment:
        yield f"{name}: {before or 'not recorded'} -> {after or 'not recorded'}"


def _noise(comparison: ResultComparison) -> Iterator[str]:
    def spread(noise: Noise) -> str:
        return f"{noise.spread:.1%}" + (" (assumed: it has one round)" if noise.is_assumed else "")

    yield f"spread of a round: {spread(comparison.before_noise)} -> {spread(comparison.after_noise)}"
    if comparison.before_noise.is_assumed or comparison.after_noise.is_assumed:
        yield "one round does not show the noise; measure with --rounds 3 or more"


def _drift(comparison: ResultComparison) -> Iterator[str]:
    drift = comparison.drift
    if drift is None:
        return
    if drift.is_divided_out:
        yield (
            f"the peers took {number_text(drift.ratio)} times as long (median of {drift.cases} cases): this is "
            "attributed to the machine and divided out of the ratios below"
        )
    elif abs(drift.ratio - 1) * 100 > _FEWEST_PERCENT:
        yield (
            f"all cases together took {number_text(drift.ratio)} times as long (median of {drift.cases}): without "
            "unchanged peers it is unknown whether that is the machine or code that they share"
        )


def _cases(where: str, cases: tuple[Case, ...]) -> Iterator[str]:
    for series in dict.fromkeys(series for series, _, _ in cases):
        shapes = ", ".join(f"{batch} x {tokens}" for name, batch, tokens in cases if name == series)
        yield f"{where}: {series} at {shapes}"


def _line(change: Change) -> str:
    series, batch, tokens = change.case
    where = f"{series}, {tokens} tokens" if change.kind is ChangeKind.LARGEST_BATCH else f"{series}, {batch} x {tokens}"
    noise = "" if change.standard_error is None else f", noise {change.standard_error:.1%}"
    ratio = "" if change.ratio is None else f" ({number_text(change.ratio)}x{noise})"
    return f"{where}: {change.kind.value} {_value(change, change.before)} -> {_value(change, change.after)}{ratio}"


def _value(change: Change, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if change.kind is ChangeKind.LATENCY:
        return ms_text(value)
    if change.kind in (ChangeKind.MEMORY, ChangeKind.GROWTH):
        return bytes_text(int(value))
    return f"{value:.2g}" if change.kind is ChangeKind.ERROR else f"{value:g}"


def _summary(comparison: ResultComparison) -> str:
    changed = len({change.case for change in comparison.changes})
    if not comparison.compared:
        return "the two results have no case in common"
    if not changed:
        return f"nothing changed beyond the noise in {comparison.compared} cases"
    return f"{len(comparison.changes)} changes in {changed} of {comparison.compared} cases"
