"""Rounds of a benchmark: each round runs every case in its own process; the figures are put together."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdexport.bench.baselines.baseline import CaseFigures, CaseSpec
from hdexport.bench.measure.calls import environment, latency_of
from hdexport.bench.measure.processes import run_function
from hdexport.bench.results.result import (
    SCHEMA_VERSION,
    BenchResult,
    CaseResult,
    OutputError,
    PeakMemory,
    RunStatus,
    Series,
)
from hdexport.bench.run.plan import BenchOptions, PlannedSeries, plan
from hdexport.bench.run.preparation import Preparation, Watcher
from hdexport.bench.run.worker import measured

_MIN_RUNS = 10
"""Minimum number of timed runs of a case, over all its rounds."""

_MIN_SECONDS = 1.0
"""Minimum duration of all timed runs of a case together."""


class Bench:
    """One run of a benchmark. Prepared files, such as exports, are written to the empty directory `scratch`."""

    def __init__(self, options: BenchOptions, watcher: Watcher, scratch: Path) -> None:
        self._options, self._watcher = options, watcher
        self._plan = plan(options)
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._records = [
            (
                planned,
                _CaseRecord(CaseResult(series=planned.series.name, batch=batch, tokens=tokens, status=RunStatus.OK)),
            )
            for tokens, batch in itertools.product(self._plan.lengths, self._plan.batches)
            for planned in self._plan.series
            if planned.is_available
        ]
        self._notes: list[str] = []
        self._prepared = Preparation(self._plan, scratch, watcher)

    @property
    def has_results(self) -> bool:
        """Whether a round of any case has ended."""
        return any(True for _ in self._cases())

    def note(self, text: str) -> None:
        """Add a note for the reader."""
        self._notes.append(text)
        self._watcher.note(text)

    def prepare(self) -> None:
        """Make the files that the cases need, which may take longer than the cases."""
        for text in self._plan.notes:
            self.note(text)
        self._prepared.run()
        for text in self._prepared.notes:
            self.note(text)

    def measure(self) -> None:
        """Run every case once per round, so that drift of the machine affects all cases alike."""
        cases = [(record.case.series, record.case.batch, record.case.tokens) for _, record in self._records]
        self._watcher.planned(cases, self._options.rounds)
        for number in range(1, self._options.rounds + 1):
            for case, (planned, record) in zip(cases, self._records, strict=True):
                # A case that ran out of memory would do so again.
                if record.end is None:
                    self._watcher.begin(*case, number)
                    self._run_round(planned, record)
                    result = record.result()
                    assert result is not None
                    self._watcher.finish(result)

    def result(self) -> BenchResult:
        """Result so far."""
        return BenchResult(
            schema_version=SCHEMA_VERSION,
            date=self._date,
            command=self._options.command,
            environment=environment(self._plan.threads),
            rounds=self._options.rounds,
            series=tuple(map(self._series_of, self._plan.series)),
            cases=tuple(self._cases()),
            notes=tuple(self._notes),
        )

    def _cases(self) -> Iterator[CaseResult]:
        results = (record.result() for _, record in self._records)
        yield from (case for case in results if case is not None)

    def _series_of(self, planned: PlannedSeries) -> Series:
        made = self._prepared.made(planned)
        remarks = [remark for remark in (planned.series.remark, made.remark if made else None) if remark]
        return dataclasses.replace(
            planned.series,
            remark="; ".join(remarks) or None,
            unavailable=planned.series.unavailable or self._prepared.failure(planned),
        )

    def _run_round(self, planned: PlannedSeries, record: _CaseRecord) -> None:
        failure, max_len = self._prepared.failure(planned), planned.bundle.manifest.max_len
        if record.case.tokens > max_len:
            failure = f"The bundle accepts 1 to {max_len} tokens."
        if failure is not None:
            record.end = RunStatus.FAILED, failure
            return
        call = functools.partial(measured, self._spec(planned, record.case.batch, record.case.tokens))
        outcome, figures = run_function(call, time_limit_s=self._options.time_limit_s)
        if figures is None:
            record.end = outcome.status, outcome.reason or "The process gave no reason."
        else:
            record.rounds.append(figures)

    def _spec(self, planned: PlannedSeries, batch: int, tokens: int) -> CaseSpec:
        made = self._prepared.made(planned)
        return CaseSpec(
            bundle=planned.bundle.path,
            inputs=self._prepared.inputs(planned, batch, tokens),
            backend="" if planned.baseline else planned.series.runner,
            baseline=planned.baseline,
            artefact=None if made is None else made.artefact,
            expected=self._prepared.expected(planned, batch, tokens),
            device=planned.device,
            precision=planned.precision,
            threads=self._plan.threads,
            min_runs=math.ceil(_MIN_RUNS / self._options.rounds),
            min_seconds=_MIN_SECONDS / self._options.rounds,
        )


@dataclass
class _CaseRecord:
    """Rounds of one series at one batch size and length.

    Attributes:
        end: status and reason of a round without figures; then the case has no figures and needs no other round.
    """

    case: CaseResult
    rounds: list[CaseFigures] = field(default_factory=list)
    end: tuple[RunStatus, str] | None = None

    def result(self) -> CaseResult | None:
        """Result so far; None before the first round."""
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
        )


def _largest(peaks: list[PeakMemory]) -> PeakMemory:
    def largest(name: str) -> Any:
        return max((value for peak in peaks if (value := getattr(peak, name)) is not None), default=None)

    return PeakMemory(**{each.name: largest(each.name) for each in dataclasses.fields(PeakMemory)})


def _badness(error: OutputError) -> tuple[bool, float, float]:
    """Outputs beyond the tolerance are worse than all outputs within it; outputs that are not finite are the worst."""
    return not error.passed, error.size, -error.min_cosine
