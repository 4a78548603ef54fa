"""What is known of one case while its rounds go on."""

from __future__ import annotations

__all__ = ["CaseRecord"]

import dataclasses
from collections.abc import Iterable
from typing import Any

from hdexport.bench.measure.calls import latency_of
from hdexport.bench.measure.case import CaseFigures
from hdexport.bench.measure.roofline import Work, roofline
from hdexport.bench.results.result import CaseResult, Ceilings, OutputError, PeakMemory, Status


class CaseRecord:
    """The rounds of one series at one batch size and length.

    Args:
        series: its name.
        batch: texts.
        tokens: of each.
    """

    def __init__(self, series: str, batch: int, tokens: int) -> None:
        self._series, self._batch, self._tokens = series, batch, tokens
        self._rounds: list[CaseFigures] = []
        self._end: tuple[Status, str] | None = None

    @property
    def is_over(self) -> bool:
        """Whether another round would be for nothing: a case that runs out of memory does so again."""
        return self._end is not None

    def add(self, figures: CaseFigures) -> None:
        """A round gave figures."""
        self._rounds.append(figures)

    def end(self, status: Status, reason: str) -> None:
        """A round gave none, so that the case has none: half of its rounds would not be comparable."""
        self._end = status, reason

    def result(self, work: Work | None, ceilings: Ceilings | None) -> CaseResult | None:
        """What is known; None before the first round.

        Args:
            work: what the model must do for the batch, None where it was not counted.
            ceilings: what the machine can do, None where it was not measured.
        """
        case = CaseResult(series=self._series, batch=self._batch, tokens=self._tokens, status=Status.OK)
        if self._end is not None:
            return dataclasses.replace(case, status=self._end[0], reason=self._end[1])
        if not self._rounds:
            return None
        latency = latency_of(
            [figures.latencies_ms for figures in self._rounds],
            is_stable=all(figures.is_stable for figures in self._rounds),
        )
        return dataclasses.replace(
            case,
            latency=latency,
            tokens_per_s=self._batch * self._tokens / latency.p50_ms * 1e3,
            memory=_largest(figures.memory for figures in self._rounds),
            error=_worst([figures.error for figures in self._rounds if figures.error is not None]),
            roofline=roofline(work, ceilings, p50_ms=latency.p50_ms) if work and ceilings else None,
        )


def _largest(peaks: Iterable[PeakMemory]) -> PeakMemory:
    rounds = list(peaks)
    figures: dict[str, Any] = {}
    for field in dataclasses.fields(PeakMemory):
        known = [value for peak in rounds if (value := getattr(peak, field.name)) is not None]
        figures[field.name] = max(known, default=None)
    return PeakMemory(**figures)


def _worst(errors: list[OutputError]) -> OutputError | None:
    """One that did not pass before all that did; an output that is not finite has no largest difference."""

    def badness(error: OutputError) -> tuple[bool, float, float]:
        largest = float("inf") if error.max_abs_error is None else error.max_abs_error
        return not error.passed, largest, -error.min_cosine

    return max(errors, key=badness, default=None)
