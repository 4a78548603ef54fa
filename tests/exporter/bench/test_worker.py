"""The process that measures a case: a real bundle, callables that tell when they are called, and too little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hdexport.bench.measure.calls import WarmUp
from hdexport.bench.measure.case import CaseFigures, CaseSpec
from hdexport.bench.measure.processes import Outcome, run_process
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


def run_case(spec: CaseSpec, **limits: Any) -> tuple[Outcome, CaseFigures | None]:
    return run_function(partial(measured, spec), time_limit_s=_TIME_LIMIT_S, **limits)


def test_a_known_failure_is_its_message(spec: CaseSpec) -> None:
    outcome, figures = run_case(dataclasses.replace(spec, bundle="nowhere"))
    assert (outcome.status, figures) == (Status.FAILED, None)
    assert "nowhere" in (outcome.reason or "")
    assert "Traceback" not in (outcome.reason or "")


@needs_linux
def test_a_case_that_takes_more_memory_than_it_may_is_out_of_memory(spec: CaseSpec) -> None:
    outcome, figures = run_case(spec, memory_limit_bytes=20_000_000)
    assert (outcome.status, figures) == (Status.OUT_OF_MEMORY, None)


_CASE = """
import os, resource, sys
from pathlib import Path
import numpy as np
from hdexport.bench.measure import remote
from hdexport.bench.run import worker
from hdexport.bench.peers.peer import OpenCase

def little_memory():
    "50 MB more than what is mapped."
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 50_000_000,) * 2)

{open_case}

worker.open_case = open_case
remote.main(sys.argv[1:])
"""

_ONNXRUNTIME = """
def open_case(spec):
    import onnxruntime
    session = onnxruntime.InferenceSession(Path(spec.bundle) / "model.onnx")
    inputs = dict(np.load(spec.inputs))
    little_memory()
    return OpenCase(lambda: session.run(None, inputs), False)
"""

_TORCH = """
def open_case(spec):
    import torch
    little_memory()
    return OpenCase(lambda: torch.ones(100_000_000), False)
"""

_NUMPY = """
def open_case(spec):
    little_memory()
    return OpenCase(lambda: np.ones(100_000_000), False)
"""

_NOISY = """
def open_case(spec):
    def call():
        print("Python's")
        os.write(1, b"C++'s")
        return {}
    return OpenCase(call, False)
"""


def command_of(open_case: str, spec: CaseSpec, folder: Path) -> list[str]:
    """A process that opens something else."""
    (folder / "call.pickle").write_bytes(pickle.dumps(partial(measured, spec)))
    return ["-c", _CASE.replace("{open_case}", open_case), "a case", str(folder)]


@needs_linux
@pytest.mark.parametrize(
    ("open_case", "said"),
    [
        pytest.param(_ONNXRUNTIME, "Failed to allocate memory", id="onnxruntime"),
        pytest.param(_TORCH, "can't allocate memory", id="torch", marks=pytest.mark.nightly),
        pytest.param(_NUMPY, "Unable to allocate 763. MiB", id="numpy"),
    ],
)
def test_what_frameworks_raise_without_memory_is_out_of_memory(
    open_case: str, said: str, workshop: Callable[..., Any], tmp_path: Path
) -> None:
    spec = workshop("bert").spec("onnxruntime", 64, 300)
    outcome = run_process(command_of(open_case, spec, tmp_path), time_limit_s=_TIME_LIMIT_S)
    assert outcome.status is Status.OUT_OF_MEMORY
    assert outcome.reason is not None
    assert said in outcome.reason


def test_what_frameworks_print_is_not_in_the_result(spec: CaseSpec, tmp_path: Path) -> None:
    command = command_of(_NOISY, dataclasses.replace(spec, expected=None), tmp_path)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=_TIME_LIMIT_S)
    assert json.loads(done.stdout) == {}
    assert "Python's" in done.stderr
    assert "C++'s" in done.stderr


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
    monkeypatch.setattr(worker, "warm_up", lambda call: told.tell("warm up", WarmUp(3, True)))
    monkeypatch.setattr(worker, "wrong_by", lambda spec, outputs, case: told.tell("compare", error))
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


@pytest.mark.parametrize("is_listed", [True, False])
def test_on_a_gpu_the_peak_is_what_nvml_sees(
    is_listed: bool, told: Told, spec: CaseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SimpleNamespace(
        look=lambda: told.tell("look"), rest=lambda: told.tell("rest"), peak_bytes=99, is_of_process=is_listed
    )
    monkeypatch.setattr(worker, "GpuMemoryWatch", lambda: contextlib.nullcontext(watch))
    figures = measured(dataclasses.replace(spec, device="cuda", least_runs=1, least_seconds=1e-9))
    assert (figures.memory.vram_bytes, figures.memory.vram_is_of_device) == (99, not is_listed)
    # Not while runs are timed.
    assert told.events.index("warm up") < told.events.index("rest") < told.events.index("call")
    assert told.events.index("look") > told.events.index("call")
