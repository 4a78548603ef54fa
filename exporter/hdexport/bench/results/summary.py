"""Summary of a benchmark in sentences: headline, notes, and a caution about too few rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from hdexport.bench.results.formatting import bytes_text, ms_text, outputs_text
from hdexport.bench.results.result import BenchResult, CaseResult, CaseState, RunStatus, Series

_MIN_ROUNDS = 3
"""With fewer rounds, the spread of rounds is unknown."""

_NAMES = {
    "torch": "PyTorch",
    "torch-compile": "torch.compile",
    "onnx-plain": "a plain ONNX export",
    "optimum": "Optimum",
}
"""Baseline -> its name in a sentence; other baselines keep their names."""


class NoteKind(StrEnum):
    """Kind of a note; the most important kind is first."""

    WRONG = "wrong"
    FAILED = "failed"
    DIFFERS = "differs"
    UNAVAILABLE = "unavailable"
    NOTE = "note"


class Note(NamedTuple):
    """A fact that a reader has to know before the numbers; `series` is None for a note about the whole run."""

    kind: NoteKind
    series: str | None
    text: str


def notes(result: BenchResult) -> list[Note]:
    """Notes about a benchmark, the most important note first."""
    listed = [Note(NoteKind.NOTE, None, note) for note in result.notes]
    for series in result.series:
        cases = [case for case in result.cases if case.series == series.name]
        listed += [Note(kind, series.name, text) for kind, text in _case_notes(cases)]
        if series.unavailable is not None:
            listed.append(Note(NoteKind.UNAVAILABLE, series.name, series.unavailable))
        if series.remark is not None:
            listed.append(Note(NoteKind.NOTE, series.name, series.remark))
    order = list(NoteKind)
    return sorted(listed, key=lambda note: order.index(note.kind))


def headline(result: BenchResult) -> str:
    """Result in a sentence: ``2.1 times as fast as PyTorch at 4096 tokens, with 0.46 of its memory; slower at 64
    tokens``.

    The first measured bundle is compared with PyTorch, or else with the first measured baseline, at the longest
    sequences of the smallest batch for which the outputs of both are right. A baseline whose outputs differ by a
    requested change of the model is compared too. Without such a pair, the headline is the bundle's latency.
    """
    bundles = [series for series in result.series if not series.is_baseline and _measured(result, series)]
    if not bundles:
        measured = result.first_series
        return f"Only {measured} could be measured" if measured else "Nothing could be measured"
    bundle = bundles[0]
    cases = _measured(result, bundle)
    prefix = f"{bundle.name}: " if len(bundles) > 1 else ""
    wrong = [case for case in cases if case.state is CaseState.WRONG]
    if wrong:
        return f"{prefix}Wrong outputs at {_shapes(wrong)}"
    baselines = [series for series in result.series if series.is_baseline]
    for baseline in sorted(baselines, key=lambda series: series.runner != "torch"):
        others = [(case, result.case(baseline.name, case.batch, case.tokens)) for case in cases]
        pairs = [(case, other) for case, other in others if other is not None and _is_comparable(other)]
        if pairs:
            return prefix + _comparison(pairs, _NAMES.get(baseline.runner, baseline.runner))
    case = min(cases, key=_rank)
    assert case.latency is not None
    return f"{prefix}{ms_text(case.latency.p50_ms)} for {_shape(case)}{_memory_text(case)}"


def caution(result: BenchResult) -> str | None:
    """Warning if a case has too few rounds to trust a ratio, or None."""
    rounds = min((len(case.latency.rounds_p50_ms) for case in result.cases if case.latency), default=_MIN_ROUNDS)
    if rounds >= _MIN_ROUNDS:
        return None
    counted = "1 round was" if rounds == 1 else f"{rounds} rounds were"
    return f"Only {counted} measured: differences may be noise. Measure {_MIN_ROUNDS} rounds or more."


def model_names(result: BenchResult) -> list[str]:
    """Distinct names of the models; a result without names has the names of its bundles' directories."""
    return list(dict.fromkeys(series.model or Path(series.bundle).name for series in result.series))


def _case_notes(cases: Sequence[CaseResult]) -> Iterator[tuple[NoteKind, str]]:
    for kind, state in ((NoteKind.WRONG, CaseState.WRONG), (NoteKind.DIFFERS, CaseState.DIFFERS)):
        beyond = [case for case in cases if case.state is state]
        if beyond:
            worst = max(beyond, key=lambda case: case.error.size if case.error else 0.0)
            yield kind, f"{outputs_text(worst)} ({_where(beyond)})"
    reasons: dict[tuple[RunStatus, str], list[CaseResult]] = defaultdict(list)
    for case in cases:
        if case.status is not RunStatus.OK:
            reasons[case.status, case.reason or ""].append(case)
    for (status, reason), ended in reasons.items():
        yield NoteKind.FAILED, f"{status.value} at {_where(ended)}" + (f": {reason}" if reason else "")
    unstable = [case for case in cases if case.latency is not None and not case.latency.is_stable]
    if unstable:
        yield NoteKind.NOTE, f"the latency still changed when timing began, at {_where(unstable)}"


def _where(cases: Sequence[CaseResult]) -> str:
    by_batch: dict[int, list[str]] = defaultdict(list)
    for case in cases:
        by_batch[case.batch].append(str(case.tokens))
    return " and ".join(f"batch {batch} with {', '.join(tokens)} tokens" for batch, tokens in by_batch.items())


def _measured(result: BenchResult, series: Series) -> list[CaseResult]:
    return [case for case in result.cases if case.series == series.name and case.latency is not None]


def _is_comparable(case: CaseResult) -> bool:
    return case.state in (CaseState.OK, CaseState.DIFFERS)


def _rank(case: CaseResult) -> tuple[int, int]:
    return case.batch, -case.tokens


def _comparison(pairs: Sequence[tuple[CaseResult, CaseResult]], name: str) -> str:
    case, other = min(pairs, key=lambda pair: _rank(pair[0]))
    changes = other.error.missing_changes if other.error and other.state is CaseState.DIFFERS else ()
    without = f" without the change of {' and '.join(change.value for change in changes)}" if changes else ""
    memory = _memory_ratio(case, other)
    text = f"{_speed(case, other)} {name}{without} at {_shape(case)}{memory}"
    slower = [own for own, base in pairs if own is not case and _is_slower(own, base)]
    return text + (f"; slower at {_shapes(slower)}" if slower and not _is_slower(case, other) else "")


def _is_slower(case: CaseResult, other: CaseResult) -> bool:
    assert case.latency is not None
    assert other.latency is not None
    ratio = case.latency.over(other.latency)
    return ratio.min > 1 and _factor_text(ratio.value) != "1.0"


def _speed(case: CaseResult, other: CaseResult) -> str:
    assert case.latency is not None
    assert other.latency is not None
    ratio = case.latency.over(other.latency)
    factor = _factor_text(max(ratio.value, 1 / ratio.value))
    if _is_slower(case, other):
        return f"Takes {factor} times as long as"
    return "About as fast as" if ratio.max >= 1 or factor == "1.0" else f"{factor} times as fast as"


def _factor_text(factor: float) -> str:
    """``0.46``, ``2.1``, ``34``."""
    return f"{factor:.{2 if factor < 0.995 else 1 if factor < 9.95 else 0}f}"


def _memory_ratio(case: CaseResult, other: CaseResult) -> str:
    own, base = (each.memory.peak_bytes if each.memory else None for each in (case, other))
    if not own or not base:
        return ""
    return f", with {_factor_text(own / base)} {'of' if own < base else 'times'} its memory"


def _memory_text(case: CaseResult) -> str:
    peak_bytes = case.memory.peak_bytes if case.memory else None
    return f", with {bytes_text(peak_bytes)} of memory" if peak_bytes else ""


def _shape(case: CaseResult) -> str:
    return f"{case.tokens} tokens" if case.batch == 1 else f"{case.batch} x {case.tokens} tokens"


def _shapes(cases: Sequence[CaseResult]) -> str:
    return ", ".join(map(_shape, sorted(cases, key=lambda case: (case.batch, case.tokens))))
