"""The process that measures a case: a real bundle, callables that tell when they are called, and too little memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hdexport.bench.measure.case import CaseFigures, CaseSpec
from hdexport.bench.measure.processes import ProcessOutcome
from hdexport.bench.measure.remote import run_function
from hdexport.bench.peers.peer import OpenCase
from hdexport.bench.results.result import OutputError, Status
from hdexport.bench.run import worker
from hdexport.bench.run.worker import measured

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

_TIME_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def spec(workshop: Callable[..., Any]) -> CaseSpec:
    """A tiny bundle in ONNX Runtime."""
    made: CaseSpec = workshop("bert").spec("onnxruntime", 2, 100)
    return dataclasses.replace(made, least_runs=4, least_seconds=0.01)


def run_case(spec: CaseSpec, **limits: Any) -> tuple[ProcessOutcome, CaseFigures | None]:
    return run_function(partial(measured, spec), time_limit_s=_TIME_LIMIT_S, **limits)


@needs_linux
def test_a_case_that_takes_more_memory_than_it_may_is_out_of_memory(spec: CaseSpec) -> None:
    outcome, figures = run_case(spec, memory_limit_bytes=20_000_000)
    assert (outcome.status, figures) == (Status.OUT_OF_MEMORY, None)


@dataclasses.dataclass
class Told:
    """What happened, in order, in a case that does nothing."""

    events: list[str] = dataclasses.field(default_factory=list)

    def tell(self, event: str, answer: Any = None) -> Any:
        self.events.append(event)
        return answer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """In the place of a case, of the peaks, and of the comparison."""
    told = Told()
    case = OpenCase(
        call=lambda: told.tell("call", {}),
        half_precision=False,
        allocator_bytes=lambda: told.tell("allocator", 11),
        engine_bytes=lambda: told.tell("engine", 22),
        close=lambda: told.tell("close"),
    )
    peaks = iter([700, 600])
    error = OutputError(max_abs_error=0.0, min_cosine=1.0, passed=True, tolerance="any")
    monkeypatch.setattr(worker, "open_case", lambda spec: told.tell("open", case))
    monkeypatch.setattr(worker, "peak_resident_bytes", lambda: told.tell("peak", next(peaks)))
    monkeypatch.setattr(worker, "with_growth", lambda call: (call(), told.tell("growth", 50)))
    monkeypatch.setattr(worker, "warm_up", lambda call: told.tell("warm up", True))
    monkeypatch.setattr(worker, "wrong_by", lambda expected, outputs, case: told.tell("compare", error))
    return told


def test_all_is_measured_before_anything_is_compared(told: Told, spec: CaseSpec) -> None:
    figures = measured(dataclasses.replace(spec, least_runs=2, least_seconds=1e-9))
    assert told.events == [
        "open", "peak", "warm up", "call", "call", "growth", "peak", "allocator", "engine", "call", "compare", "close",
    ]  # fmt: skip
    # Loading took more than running.
    assert (figures.memory.rss_bytes, figures.memory.growth_bytes) == (700, 50)
    assert (figures.memory.allocator_bytes, figures.memory.engine_bytes) == (11, 22)
    assert figures.is_stable


def test_a_probe_of_memory_is_one_call(told: Told, spec: CaseSpec) -> None:
    figures = measured(dataclasses.replace(spec, expected=None, least_runs=1, least_seconds=0.0))
    assert (told.events.count("call"), len(figures.latencies_ms), figures.error) == (1, 1, None)
    assert "warm up" not in told.events


def test_a_case_that_fails_is_closed(told: Told, spec: CaseSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(worker, "warm_up", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        measured(spec)
    assert told.events[-1] == "close"
