"""A benchmark's rounds: each case's processes run in turn, and their figures are put together."""

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

from hdexport.bench.measure.calls import environment, latency_of
from hdexport.bench.measure.processes import run_function
from hdexport.bench.measure.roofline import Work, roofline
from hdexport.bench.peers.peer import CaseFigures, CaseSpec
from hdexport.bench.results.result import (
    SCHEMA_VERSION,
    BenchResult,
    CaseResult,
    Ceilings,
    LargestBatch,
    OutputError,
    PeakMemory,
    Series,
    Status,
)
from hdexport.bench.run.budget import Probe, largest_batch, probe_case
from hdexport.bench.run.plan import BenchOptions, PlannedSeries, plan
from hdexport.bench.run.preparation import Preparation, Watcher
from hdexport.bench.run.worker import measured

_LEAST_RUNS = 10
"""Timed runs of a case, over all its rounds."""

_LEAST_SECONDS = 1.0
"""Least duration of a case's timed runs together."""

_SEARCH_LIMITS = 3
"""A search for the largest batch starts no process after this many time limits of one."""


class Bench:
    """One run; prepared files, such as checkpoints and exports, go to the empty folder `scratch` and may be large."""

    def __init__(self, options: BenchOptions, watcher: Watcher, scratch: Path) -> None:
        self._options, self._watcher = options, watcher
        self._plan = plan(options)
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._records = [
            (planned, _CaseRecord(CaseResult(series=planned.series.name, batch=batch, tokens=tokens, status=Status.OK)))
            for tokens, batch in itertools.product(self._plan.lengths, self._plan.batches)
            for planned in self._plan.series
            if planned.is_available
        ]
        self._largest_batches: list[LargestBatch] = []
        self._notes: list[str] = []
        self._prepared = Preparation(self._plan, scratch, watcher)

    @property
    def has_results(self) -> bool:
        """Whether a round of any case has ended."""
        return any(True for _ in self._cases())

    def note(self, text: str) -> None:
        """Adds a note for the reader."""
        self._notes.append(text)
        self._watcher.note(text)

    def prepare(self) -> None:
        """Makes the files that the cases need, which may take longer than the cases do."""
        for text in self._plan.notes:
            self.note(text)
        self._prepared.run()
        for text in self._prepared.notes:
            self.note(text)

    def measure(self) -> None:
        """Runs every case once per round, neighbours in a table one after the other, so that drift affects
        all alike."""
        cases = [(record.case.series, record.case.batch, record.case.tokens) for _, record in self._records]
        self._watcher.planned(cases, self._options.rounds)
        for number in range(1, self._options.rounds + 1):
            for case, (planned, record) in zip(cases, self._records, strict=True):
                # A case that ran out of memory would do so again.
                if record.end is None:
                    self._watcher.begin(*case, number)
                    self._run_round(planned, record)
                    result = self._result_of(planned, record)
                    assert result is not None
                    self._watcher.finish(result)
        self._prepared.measure_ceilings()
        if self._options.memory_budget_bytes is not None:
            self._find_largest_batches(self._options.memory_budget_bytes)

    def result(self) -> BenchResult:
        """The result so far."""
        return BenchResult(
            schema_version=SCHEMA_VERSION,
            date=self._date,
            command=self._options.command,
            environment=environment(self._plan.threads),
            rounds=self._options.rounds,
            series=tuple(map(self._series_of, self._plan.series)),
            cases=tuple(self._cases()),
            ceilings=self._prepared.ceilings,
            largest_batches=tuple(self._largest_batches),
            notes=tuple(self._notes),
        )

    def _cases(self) -> Iterator[CaseResult]:
        results = (self._result_of(planned, record) for planned, record in self._records)
        yield from (case for case in results if case is not None)

    def _result_of(self, planned: PlannedSeries, record: _CaseRecord) -> CaseResult | None:
        work = self._prepared.work_of(planned, record.case.batch, record.case.tokens)
        return record.result(work, self._prepared.ceilings_of(planned))

    def _series_of(self, planned: PlannedSeries) -> Series:
        made = self._prepared.made(planned)
        remarks = [remark for remark in (planned.series.remark, made.remark if made else None) if remark]
        return dataclasses.replace(
            planned.series,
            remark="; ".join(remarks) or None,
            unavailable=planned.series.unavailable or self._prepared.failure(planned),
        )

    def _run_round(self, planned: PlannedSeries, record: _CaseRecord) -> None:
        batch, tokens = record.case.batch, record.case.tokens
        failure = self._prepared.failure(planned)
        if tokens > planned.bundle.manifest.max_len:
            failure = f"The bundle takes 1 to {planned.bundle.manifest.max_len} tokens."
        if failure is not None:
            record.end = Status.FAILED, failure
            return
        call = functools.partial(measured, self._spec(planned, batch, tokens))
        outcome, figures = run_function(call, time_limit_s=self._options.time_limit_s)
        if figures is None:
            record.end = outcome.status, outcome.reason or "No reason was given."
        else:
            record.rounds.append(figures)

    def _spec(self, planned: PlannedSeries, batch: int, tokens: int) -> CaseSpec:
        made = self._prepared.made(planned)
        return CaseSpec(
            runner=planned.series.runner,
            bundle=planned.bundle.path,
            artefact=None if made is None else made.artefact,
            inputs=self._prepared.inputs(planned, batch, tokens),
            expected=self._prepared.expected(planned, batch, tokens),
            device=planned.device,
            precision=planned.precision,
            threads=self._plan.threads,
            least_runs=math.ceil(_LEAST_RUNS / self._options.rounds),
            least_seconds=_LEAST_SECONDS / self._options.rounds,
        )

    def _find_largest_batches(self, budget_bytes: int) -> None:
        for tokens, planned in itertools.product(self._plan.lengths, self._plan.series):
            can_run = planned.is_available and self._prepared.failure(planned) is None
            if can_run and tokens <= planned.bundle.manifest.max_len:
                self._watcher.step(f"Largest batch of {tokens} tokens, {planned.series.name}")
                found = largest_batch(
                    functools.partial(self._probe, planned, tokens, budget_bytes),
                    budget_bytes=budget_bytes,
                    time_limit_s=_SEARCH_LIMITS * self._options.time_limit_s,
                )
                self._largest_batches.append(
                    LargestBatch(
                        series=planned.series.name, tokens=tokens, budget_bytes=budget_bytes, **found._asdict()
                    )
                )

    def _probe(self, planned: PlannedSeries, tokens: int, budget_bytes: int, batch: int) -> Probe:
        spec = self._spec(planned, batch, tokens)
        return probe_case(spec, budget_bytes=budget_bytes, time_limit_s=self._options.time_limit_s)


@dataclass
class _CaseRecord:
    """The rounds of one series at one batch size and length, while they go on.

    Attributes:
        end: how a round ended without figures; the case then has none, and needs no other round.
    """

    case: CaseResult
    rounds: list[CaseFigures] = field(default_factory=list)
    end: tuple[Status, str] | None = None

    def result(self, work: Work | None, ceilings: Ceilings | None) -> CaseResult | None:
        """The result so far; None before the first round. Without work or ceilings it has no roofline."""
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
