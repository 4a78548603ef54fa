"""A benchmark in words: its figures, the columns of its tables, its findings and its headline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hdexport.bench.results.result import BenchResult, CaseResult, OutputError, Ratio, Series, Status

_DIGITS = 3
"""Least significant digits of a figure; whole numbers keep all."""

_LEAST_PLAIN_ERROR = 1e-3
"""Smaller ones are written with an exponent."""

LATENCIES = ("p50", "p95", "p99", "mean", "sd")
"""Columns in milliseconds."""

_MEMORY = {
    "GPU": "vram_bytes",
    "allocator": "allocator_bytes",
    "engine": "engine_bytes",
    "resident": "rss_bytes",
    "added": "growth_bytes",
}
"""Column -> the field of `PeakMemory`."""

_KINDS = ("wrong", "failed", "unavailable", "note")

_FEWEST_ROUNDS = 3
"""With fewer rounds, the spread of rounds is unknown."""

_PEERS = {
    "torch": "PyTorch",
    "torch-compile": "torch.compile",
    "onnx-plain": "a plain ONNX export",
    "optimum": "Optimum",
}
"""Runner -> its name in a sentence; other runners keep their names."""


def number_text(value: float) -> str:
    """Three significant digits, or the whole number: ``0.0213``, ``3.42``, ``34.2``, ``3,421``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def ms_text(value: float) -> str:
    return f"{number_text(value)} ms"


def bytes_text(value: int) -> str:
    """``412 MB`` or ``5.31 GB``, in powers of ten."""
    unit, name = (1e9, "GB") if value >= 1e9 else (1e6, "MB")
    return f"{number_text(value / unit)} {name}"


def error_text(error: OutputError | None) -> str:
    """The largest absolute difference: ``3.1e-6``, ``0.35``, ``0`` or ``not finite``; empty if nothing was compared."""
    if error is None:
        return ""
    if error.max_abs_error is None:
        return "not finite"
    if error.max_abs_error == 0 or error.max_abs_error >= _LEAST_PLAIN_ERROR:
        return f"{error.max_abs_error:.2g}"
    digits, _, exponent = f"{error.max_abs_error:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def ratio_text(ratio: Ratio | None) -> str:
    """The ratio of the medians: ``3.0x``."""
    return "" if ratio is None else f"{number_text(ratio.value)}x"


def range_text(ratio: Ratio | None) -> str:
    """The range of the rounds' ratios: ``2.9 to 3.1``."""
    return "" if ratio is None else f"{number_text(ratio.least)} to {number_text(ratio.most)}"


def case_state(case: CaseResult) -> str:
    """``ok``, ``wrong``, or the status of a case without figures."""
    is_wrong = case.status is Status.OK and case.error is not None and not case.error.passed
    return "wrong" if is_wrong else case.status.value


class Column(NamedTuple):
    """One figure of a case as a column; `text` is empty for a case without that figure."""

    name: str
    unit: str
    text: Callable[[CaseResult], str]


def columns_of(result: BenchResult | None = None) -> dict[str, Column]:
    """All figures by name, in the order of tables; without a result, ratios to its first series are left out."""
    return {column.name: column for column in _columns(result)}


def findings(result: BenchResult) -> list[tuple[str, str, str]]:
    """Facts that a reader has to know before the numbers, the worst first: (kind, name of the series or "", text).
    Kinds are ``wrong`` answers, ``failed`` cases, ``unavailable`` series and ``note``."""
    said = [("note", "", note) for note in result.notes]
    for series in result.series:
        cases = [case for case in result.cases if case.series == series.name]
        said += [(kind, series.name, text) for kind, text in _case_findings(cases)]
        if series.unavailable is not None:
            said.append(("unavailable", series.name, series.unavailable))
        if series.remark is not None:
            said.append(("note", series.name, series.remark))
    return sorted(said, key=lambda finding: _KINDS.index(finding[0]))


def headline(result: BenchResult) -> str:
    """The finding in a sentence: ``2.1 times as fast as PyTorch at 4096 tokens, with 0.46 of its memory; slower at 64
    tokens``.

    The first measured bundle is compared with PyTorch, or else with the first measured peer, at the longest texts of
    the smallest batch for which both answers are right. Without such a pair, the headline says what was measured.
    """
    bundles = [series for series in result.series if not series.is_peer and _cases(result, series)]
    if not bundles:
        measured = result.first_series
        return f"Only {measured} could be measured" if measured else "Nothing could be measured"
    ours = bundles[0]
    subject = f"{ours.name}: " if len(bundles) > 1 else ""
    wrong = [case for case in _cases(result, ours) if case_state(case) == "wrong"]
    if wrong:
        return f"{subject}Wrong answers at {_shapes(wrong)}"
    peers = [series for series in result.series if series.is_peer]
    for peer in sorted(peers, key=lambda series: series.runner != "torch"):
        pairs = [(case, other) for case in _cases(result, ours) if (other := _right(result, peer, case)) is not None]
        if pairs:
            return subject + _compared(pairs, _PEERS.get(peer.runner, peer.runner))
    case = min(_cases(result, ours), key=_rank)
    assert case.latency is not None
    return f"{subject}{ms_text(case.latency.p50_ms)} for {_shape(case)}{_memory_text(case)}"


def caution(result: BenchResult) -> str | None:
    """A warning where a case has too few rounds to trust a ratio; None where all cases have enough."""
    rounds = min((len(case.latency.rounds_p50_ms) for case in result.cases if case.latency), default=_FEWEST_ROUNDS)
    if rounds >= _FEWEST_ROUNDS:
        return None
    counted = "1 round" if rounds == 1 else f"{rounds} rounds"
    return f"Only {counted} measured: differences may be noise. Measure with --rounds {_FEWEST_ROUNDS} or more."


def model_names(result: BenchResult) -> list[str]:
    """Distinct names of the models; a result without names gives the names of its bundles' directories."""
    return list(dict.fromkeys(series.model or Path(series.bundle).name for series in result.series))


def _cosine_text(error: OutputError | None) -> str:
    """The least cosine, rounded down, so that 1 is written only where it is 1."""
    if error is None or error.max_abs_error is None:
        return ""
    return f"{math.floor(error.min_cosine * 1e6) / 1e6:g}"


def _columns(result: BenchResult | None) -> Iterator[Column]:
    for name in LATENCIES:
        yield Column(name=name, unit="ms", text=_figure("latency", f"{name}_ms", number_text))
    if result is not None:
        yield Column(name="ratio", unit="to first", text=lambda case: ratio_text(result.ratio_to_first(case)))
    yield Column(
        name="tokens/s", unit="", text=lambda case: "" if case.tokens_per_s is None else number_text(case.tokens_per_s)
    )
    yield Column(name="memory", unit="", text=_figure("memory", "peak_bytes", bytes_text))
    for name, field in _MEMORY.items():
        yield Column(name=name, unit="MB", text=_figure("memory", field, lambda size: number_text(size / 1e6)))
    yield Column(name="error", unit="max abs", text=lambda case: error_text(case.error))
    yield Column(name="cosine", unit="least", text=lambda case: _cosine_text(case.error))
    yield Column(name="roofline", unit="", text=_figure("roofline", "fraction", "{:.1%}".format))


def _figure(part: str, field: str, text: Callable[..., str]) -> Callable[[CaseResult], str]:
    def cell(case: CaseResult) -> str:
        value = getattr(getattr(case, part), field, None)
        return "" if value is None else text(value)

    return cell


def _case_findings(cases: list[CaseResult]) -> Iterator[tuple[str, str]]:
    wrong = [case for case in cases if case_state(case) == "wrong"]
    if wrong:
        worst = max((case.error for case in wrong if case.error), key=lambda error: error.size)
        yield (
            "wrong",
            f"wrong answers at {_places(wrong)}: off by up to {error_text(worst)} (tolerance: {worst.tolerance})",
        )
    reasons: dict[tuple[str, str], list[CaseResult]] = defaultdict(list)
    for case in cases:
        if case.status is not Status.OK:
            reasons[case.status.value, case.reason or ""].append(case)
    for (status, reason), ended in reasons.items():
        yield "failed", f"{status} at {_places(ended)}" + (f": {reason}" if reason else "")
    unstable = [case for case in cases if case.latency is not None and not case.latency.is_stable]
    if unstable:
        yield "note", f"latency still changing when timing began, at {_places(unstable)}"


def _places(cases: list[CaseResult]) -> str:
    by_batch: dict[int, list[str]] = defaultdict(list)
    for case in cases:
        by_batch[case.batch].append(str(case.tokens))
    return " and ".join(f"batch {batch} with {', '.join(tokens)} tokens" for batch, tokens in by_batch.items())


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
        said += f"; slower at {_shapes(slower)}"
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


def _shapes(cases: list[CaseResult]) -> str:
    return ", ".join(map(_shape, sorted(cases, key=lambda case: (case.batch, case.tokens))))
