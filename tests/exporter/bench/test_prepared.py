"""What a benchmark prepares: one process for PyTorch's answers, and another for those that it did not get to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hdexport.bench.measure.processes import ProcessOutcome
from hdexport.bench.results.result import Status
from hdexport.bench.run import preparation, prepared
from hdexport.bench.run.plan import BenchOptions, plan
from hdexport.bench.run.prepared import Preparation
from hdexport.bench.run.watcher import Watcher


def outcome_of(status: Status) -> ProcessOutcome:
    return ProcessOutcome(status=status, reason="no memory")


@pytest.mark.parametrize(("too_large", "processes"), [(None, 1), (9, 2)])
def test_a_shape_that_fails_takes_no_other_with_it(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_large: int | None, processes: int
) -> None:
    subject = workshop("bert").subject
    made = Preparation(
        plan(BenchOptions(bundles=(subject.bundle,), lengths=(1, 9, 20), peers=(), model=subject.checkpoint)),
        tmp_path / "prepared",
        Watcher(),
    )
    (tmp_path / "prepared").mkdir()
    began = []

    def write(path: Path, rows: Any, *, batch: int) -> None:
        if path.name == f"expected-1x{too_large}":
            raise MemoryError
        path.touch()

    def run_here(call: partial[Any], *, time_limit_s: float) -> tuple[ProcessOutcome, Any]:
        began.append(call.func is preparation.write_expected)
        try:
            return outcome_of(Status.OK), call()
        except MemoryError:
            return outcome_of(Status.OUT_OF_MEMORY), None

    monkeypatch.setattr(preparation, "write_rows", write)
    monkeypatch.setattr(prepared, "run_function", run_here)
    monkeypatch.setattr(Preparation, "measure_ceilings", lambda self: None)
    made.run()
    (series,) = (each for each in made._plan.series if each.is_available)
    there = [tokens for tokens in (1, 9, 20) if made.expected(series, 1, tokens)]
    assert there == [tokens for tokens in (1, 9, 20) if tokens != too_large]
    notes = [note for note in made.notes if "not compared with PyTorch" in note]
    assert notes == (
        [f"1 x {too_large} tokens were not compared with PyTorch, which failed: OOM: no memory"] if too_large else []
    )
    assert sum(began) == processes
