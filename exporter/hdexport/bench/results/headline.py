"""A benchmark's finding in a sentence, and the caution that a reader needs with it."""

from __future__ import annotations

from pathlib import Path

from hdexport.bench.results.figure_text import bytes_text, case_state, ms_text
from hdexport.bench.results.result import BenchResult, CaseResult, Series, Status

_FEWEST_ROUNDS = 3
"""Fewer do not show how much rounds differ."""

_PEERS = {
    "torch": "PyTorch",
    "torch-compile": "torch.compile",
    "onnx-plain": "a plain ONNX export",
    "optimum": "Optimum",
}
"""Runner -> its name in a sentence; others keep theirs. PyTorch comes first where several can be compared with."""


def headline(result: BenchResult) -> str:
    """The finding: ``2.1 times as fast as PyTorch at 4096 tokens, with 0.46 of its memory; slower at 64 tokens``.

    The first bundle that was measured is compared with PyTorch, or with the first peer that was measured, at the
    longest texts of the smallest batch for which both answers are right. Without such a pair the headline says what
    was measured.
    """
    bundles = [series for series in result.series if not series.is_peer and _cases(result, series)]
    if not bundles:
        measured = result.first_series
        return f"Only {measured} could be measured" if measured else "Nothing could be measured"
    ours = bundles[0]
    subject = f"{ours.name}: " if len(bundles) > 1 else ""
    wrong = [case for case in _cases(result, ours) if case_state(case) == "wrong"]
    if wrong:
        return f"{subject}Wrong answers at {_where(wrong)}"
    peers = [series for series in result.series if series.is_peer]
    for peer in sorted(peers, key=lambda series: series.runner != "torch"):
        pairs = [(case, other) for case in _cases(result, ours) if (other := _right(result, peer, case)) is not None]
        if pairs:
            return subject + _compared(pairs, _PEERS.get(peer.runner, peer.runner))
    case = min(_cases(result, ours), key=_rank)
    assert case.latency is not None
    return f"{subject}{ms_text(case.latency.p50_ms)} for {_shape(case)}{_memory_text(case)}"


def caution(result: BenchResult) -> str | None:
    """The caution where a case has too few rounds to trust a ratio; None where all have enough."""
    rounds = min((len(case.latency.rounds_p50_ms) for case in result.cases if case.latency), default=_FEWEST_ROUNDS)
    if rounds >= _FEWEST_ROUNDS:
        return None
    counted = "1 round" if rounds == 1 else f"{rounds} rounds"
    return f"Only {counted} measured: differences may be noise. Measure with --rounds {_FEWEST_ROUNDS} or more."


def model_names(result: BenchResult) -> list[str]:
    """Names of the models, without repeats; names of the bundles' directories where results record no names."""
    return list(dict.fromkeys(series.model or Path(series.bundle).name for series in result.series))


def _cases(result: BenchResult, series: Series) -> list[CaseResult]:
    return [case for case in result.cases if case.series == series.name and case.latency is not None]


def _right(result: BenchResult, peer: Series, case: CaseResult) -> CaseResult | None:
    found = result.case(peer.name, case.batch, case.tokens)
    return found if found is not None and case_state(found) == Status.OK.value else None


def _rank(case: CaseResult) -> tuple[int, int]:
    return case.batch, -case.tokens


def _compared(pairs: list[tuple[CaseResult, CaseResult]], name: str) -> str:
    case, other = min(pairs, key=lambda pair: _rank(pair[0]))
    said = f"{_speed(case, other)} {name} at {_shape(case)}{_memory_ratio(case, other)}"
    slower = [mine for mine, its in pairs if mine is not case and _speed(mine, its).endswith("as long as")]
    if slower and not said.startswith("Takes"):
        said += f"; slower at {_where(slower)}"
    return said


def _speed(case: CaseResult, other: CaseResult) -> str:
    assert case.latency is not None
    assert other.latency is not None
    ratio = case.latency.over(other.latency)
    factor = _factor_text(max(ratio.value, 1 / ratio.value))
    if ratio.least <= 1 <= ratio.most or factor == "1.0":
        return "About as fast as"
    return f"{factor} times as fast as" if ratio.value < 1 else f"Takes {factor} times as long as"


def _factor_text(factor: float) -> str:
    """``0.46``, ``2.1``, ``34``."""
    return f"{factor:.{2 if factor < 0.995 else 1 if factor < 9.95 else 0}f}"


def _memory_ratio(case: CaseResult, other: CaseResult) -> str:
    ours, its = (each.memory.peak_bytes if each.memory else None for each in (case, other))
    if not ours or not its:
        return ""
    return f", with {_factor_text(ours / its)} {'of' if ours < its else 'times'} its memory"


def _memory_text(case: CaseResult) -> str:
    peak_bytes = case.memory.peak_bytes if case.memory else None
    return f", with {bytes_text(peak_bytes)} of memory" if peak_bytes else ""


def _shape(case: CaseResult) -> str:
    return f"{case.tokens} tokens" if case.batch == 1 else f"{case.batch} x {case.tokens} tokens"


def _where(cases: list[CaseResult]) -> str:
    return ", ".join(map(_shape, sorted(cases, key=lambda case: (case.batch, case.tokens))))
