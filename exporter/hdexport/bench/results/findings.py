"""Facts that a reader of a benchmark has to know before the numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hdexport.bench.results.figure_text import case_state, error_text
from hdexport.bench.results.result import BenchResult, CaseResult, Status

_KINDS = ("wrong", "failed", "unavailable", "note")


def findings(result: BenchResult) -> list[tuple[str, str, str]]:
    """Facts that a reader has to know before the numbers, the worst first: (kind, series or "", text).

    Kinds are ``wrong`` answers, ``failed`` cases, ``unavailable`` series and ``note``.
    """
    said = [("note", "", note) for note in result.notes]
    for series in result.series:
        cases = [case for case in result.cases if case.series == series.name]
        said += [(kind, series.name, text) for kind, text in _case_findings(cases)]
        if series.unavailable is not None:
            said.append(("unavailable", series.name, series.unavailable))
        if series.remark is not None:
            said.append(("note", series.name, series.remark))
    return sorted(said, key=lambda finding: _KINDS.index(finding[0]))


def _case_findings(cases: list[CaseResult]) -> Iterator[tuple[str, str]]:
    wrong = [case for case in cases if case_state(case) == "wrong"]
    if wrong:
        worst = max((case.error for case in wrong if case.error), key=lambda error: error.size)
        yield (
            "wrong",
            f"wrong answers at {_where(wrong)}: off by up to {error_text(worst)} (tolerance: {worst.tolerance})",
        )
    reasons: dict[tuple[str, str], list[CaseResult]] = defaultdict(list)
    for case in cases:
        if case.status is not Status.OK:
            reasons[case.status.value, case.reason or ""].append(case)
    for (status, reason), ended in reasons.items():
        yield "failed", f"{status} at {_where(ended)}" + (f": {reason}" if reason else "")
    unstable = [case for case in cases if case.latency is not None and not case.latency.is_stable]
    if unstable:
        yield "note", f"latency still changing when timing began, at {_where(unstable)}"


def _where(cases: list[CaseResult]) -> str:
    by_batch: dict[int, list[str]] = defaultdict(list)
    for case in cases:
        by_batch[case.batch].append(str(case.tokens))
    return " and ".join(f"batch {batch} with {', '.join(tokens)} tokens" for batch, tokens in by_batch.items())
