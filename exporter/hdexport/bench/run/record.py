"""The results of one case so far, while its rounds go on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hdexport.bench.measure.calls import latency_of
from hdexport.bench.measure.case import CaseFigures
from hdexport.bench.measure.roofline import Work, roofline
from hdexport.bench.results.result import CaseResult, Ceilings, OutputError, PeakMemory, Status


@dataclass
class CaseRecord:
    """The rounds of one series at one batch size and length.

    Attributes:
        case: the series and the shape.
        rounds: the results of each.
        end: how a round ended that gave nothing; the case then has no figures, and needs no other round.
    """

    case: CaseResult
    rounds: list[CaseFigures] = field(default_factory=list)
    end: tuple[Status, str] | None = None

    def result(self, work: Work | None, ceilings: Ceilings | None) -> CaseResult | None:
        """The results so far; None before the first round.

        Args:
            work: the model's work for the batch, None if it was not counted.
            ceilings: the machine's rates, None if they were not measured.
        """
        if self.end is not None:
            return dataclasses.replace(self.case, status=self.end[0], reason=self.end[1])
        if not self.rounds:
            return None
        is_stable = all(figures.is_stable for figures in self.rounds)
        latency = latency_of([figures.latencies_ms for figures in self.rounds], is_stable=is_stable)
        return dataclasses.replace(
            self.case,
            latency=latency,
            tokens_per_s=self.case.batch * self.case.tokens / latency.p50_ms * 1e3,
            memory=_largest([figures.memory for figures in self.rounds]),
            precision=self.rounds[0].precision.value,
            error=max((figures.error for figures in self.rounds if figures.error), key=_badness, default=None),
            roofline=roofline(work, ceilings, p50_ms=latency.p50_ms) if work and ceilings else None,
        )


def _largest(peaks: list[PeakMemory]) -> PeakMemory:
    def largest(name: str) -> Any:
        return max((value for peak in peaks if (value := getattr(peak, name)) is not None), default=None)

    return PeakMemory(**{each.name: largest(each.name) for each in dataclasses.fields(PeakMemory)})


def _badness(error: OutputError) -> tuple[bool, float, float]:
    """An answer that did not pass is worse than all that did; one that is not finite has no largest difference."""
    return not error.passed, error.size, -error.min_cosine
