"""The process that measures a case: a real bundle, callables that tell when they are called, and too little memory."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from benchmarks.baselines.openvino import default_type
from fakes.recording_runner import RecordingRunner
from hdexport.bench.baselines.baseline import CaseFigures, CaseSpec, OpenCase
from hdexport.bench.measure.processes import ProcessOutcome, run_function
from hdexport.bench.results.result import OutputError, RunStatus
from hdexport.bench.run import worker
from hdexport.bench.run.preparation import write_rows
from hdexport.bench.run.worker import measured, open_case, output_error
from hdruntime.backends.precision import Precision
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.session import Session
from support.needs import needs_openvino

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

_TIME_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def spec(workshop: Callable[..., Any]) -> CaseSpec:
    """A tiny bundle in ONNX Runtime."""
    made: CaseSpec = workshop("bert").spec("onnxruntime", 2, 100)
    return dataclasses.replace(made, min_runs=4, min_seconds=0.01)


def run_case(spec: CaseSpec, **limits: Any) -> tuple[ProcessOutcome, CaseFigures | None]:
    return run_function(partial(measured, spec), time_limit_s=_TIME_LIMIT_S, **limits)


@needs_linux
def test_a_case_that_takes_more_memory_than_it_may_is_out_of_memory(spec: CaseSpec) -> None:
    outcome, figures = run_case(spec, memory_limit_bytes=20_000_000)
    assert (outcome.status, figures) == (RunStatus.OUT_OF_MEMORY, None)


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
    monkeypatch.setattr(worker, "output_error", lambda expected, outputs, case: told.tell("compare", error))
    return told


def test_all_is_measured_before_anything_is_compared(told: Told, spec: CaseSpec) -> None:
    figures = measured(dataclasses.replace(spec, min_runs=2, min_seconds=1e-9))
    assert told.events == [
        "open", "peak", "warm up", "call", "call", "growth", "peak", "allocator", "engine", "call", "compare", "close",
    ]  # fmt: skip
    # Loading took more than running.
    assert (figures.memory.rss_bytes, figures.memory.growth_bytes) == (700, 50)
    assert (figures.memory.allocator_bytes, figures.memory.engine_bytes) == (11, 22)
    assert figures.is_stable


def test_a_probe_of_memory_is_one_call(told: Told, spec: CaseSpec) -> None:
    figures = measured(dataclasses.replace(spec, expected=None, min_runs=1, min_seconds=0.0))
    assert (told.events.count("call"), len(figures.latencies_ms), figures.error) == (1, 1, None)
    assert "warm up" not in told.events


def test_a_case_that_fails_is_closed(told: Told, spec: CaseSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(worker, "warm_up", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        measured(spec)
    assert told.events[-1] == "close"


Outputs = dict[str, np.ndarray]

ROWS, TOKENS = 3, 7


def outputs_of(seed: int = 0) -> Outputs:
    """Of three rows: vectors of tokens, of texts, and scores of tokens."""
    shapes = {"hidden": (ROWS, TOKENS, 16), "embedding": (ROWS, 16), "scores": (ROWS, TOKENS)}
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def rows_of(outputs: Outputs) -> Iterator[Outputs]:
    for row in range(ROWS):
        yield {name: values[row] for name, values in outputs.items()}


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    """Compare outputs with those of seed 0: (outputs, half_precision=False) -> OutputError."""
    path = tmp_path / "expected"
    write_rows(path, rows_of(outputs_of()), batch=ROWS)

    def compare(outputs: Outputs, *, half_precision: bool = False) -> OutputError:
        return output_error(path, outputs, OpenCase(call=dict, half_precision=half_precision))

    return compare


def test_a_file_of_rows_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> Iterator[Outputs]:
        yield next(rows_of(outputs_of()))
        raise MemoryError

    with pytest.raises(MemoryError):
        write_rows(tmp_path / "expected", broken(), batch=ROWS)
    assert list(tmp_path.iterdir()) == []


def test_the_right_answer_passes(compared: Any) -> None:
    found = compared(outputs_of())
    assert (found.max_abs_error, found.passed) == (0.0, True)
    assert found.min_cosine == pytest.approx(1.0)


def test_one_wrong_value_in_any_row_of_any_output_is_seen(compared: Any) -> None:
    for name, row in itertools.product(("hidden", "embedding", "scores"), range(ROWS)):
        outputs = outputs_of()
        outputs[name][row].flat[-1] += 0.01
        found = compared(outputs)
        assert found.max_abs_error == pytest.approx(0.01, rel=1e-3), (name, row)
        assert not found.passed, (name, row)
        assert found.tolerance == "abs 0.0001 or 2 ulp", (name, row)


def test_half_precision_passes_only_where_it_is_used_and_another_models_answer_never(compared: Any) -> None:
    rounded = {name: values.astype(np.float16).astype(np.float32) for name, values in outputs_of().items()}
    assert compared(rounded, half_precision=True).passed
    assert not compared(rounded).passed
    assert not compared(outputs_of(seed=1), half_precision=True).passed


def test_what_is_not_finite_fails_and_has_no_error(compared: Any) -> None:
    outputs = outputs_of()
    outputs["hidden"][2, 3, 4] = np.nan
    assert compared(outputs) == OutputError(
        max_abs_error=None, min_cosine=-1.0, passed=False, tolerance="abs 0.0001 or 2 ulp"
    )


def test_an_output_of_another_shape_is_wrong(compared: Any) -> None:
    for change in (lambda values: values[:, :0], lambda values: values[..., :1], lambda values: values[:2]):
        outputs = outputs_of()
        outputs["hidden"] = change(outputs["hidden"])
        found = compared(outputs)
        remark = f"; hidden: shape [3, 7, 16], not {[*outputs['hidden'].shape]}"
        assert (found.passed, found.max_abs_error) == (False, None)
        assert found.tolerance.endswith(remark)


def test_an_output_that_is_not_there_is_named_and_the_others_are_compared(compared: Any) -> None:
    outputs = outputs_of()
    del outputs["embedding"]
    found = compared(outputs)
    assert (found.passed, found.tolerance) == (True, "abs 0.0001 or 2 ulp; not compared: embedding")
    outputs["scores"] = outputs["scores"] + 1
    assert not compared(outputs).passed


def test_no_output_at_all_is_wrong(compared: Any) -> None:
    assert not compared({}).passed
    assert not compared({"other": np.zeros((ROWS, 4), np.float32)}).passed


@pytest.mark.parametrize("of_bundle", [("longformer",), ("bert", "question-answering")])
def test_a_bundle_is_right_in_our_own_runtime(workshop: Any, of_bundle: tuple[str, ...]) -> None:
    case, shapes = workshop(*of_bundle), [(1, 1), (3, 65), (3, 300)]
    case.prepare_shapes(shapes)
    for batch, tokens in shapes:
        found = case.error("onnxruntime", batch, tokens)
        assert found.passed, (batch, tokens, found)


@needs_openvino
def test_a_bundle_runs_in_openvino_itself_though_a_baseline_has_that_name(workshop: Any) -> None:
    case = workshop("bert", openvino=True)
    for precision in dict.fromkeys((Precision.FLOAT32, Precision(default_type()))):
        spec = dataclasses.replace(case.spec("openvino", 3, 65), precision=precision)
        opened = open_case(spec)
        found = output_error(spec.expected, opened.call(), opened)
        opened.close()
        assert found.passed
        assert opened.precision is precision
        assert (found.size > 1e-4) == (precision is Precision.BFLOAT16)


def test_an_answer_to_other_texts_is_wrong(workshop: Any) -> None:
    case = workshop("bert")
    spec, other = case.spec("onnxruntime", 1, 65), case.spec("onnxruntime", 3, 65)
    opened = open_case(other)
    outputs = {name: values[2:] for name, values in opened.call().items()}
    assert (opened.allocator_bytes(), opened.engine_bytes(), opened.half_precision) == (None, None, False)
    assert not output_error(spec.expected, outputs, opened).passed
    opened.close()
    with pytest.raises(BackendError, match="closed"):
        opened.call()


def test_a_batch_that_a_session_splits_is_out_of_memory(
    workshop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    np.savez(tmp_path / "inputs.npz", input_ids=np.full((3, 65), 4))
    spec = dataclasses.replace(workshop("bert").spec("onnxruntime", 3, 65), inputs=tmp_path / "inputs.npz")
    session = Session(hdruntime.open_bundle(spec.bundle), RecordingRunner(memory=2 * 65, max_len=300))
    monkeypatch.setattr(hdruntime, "load", lambda *_, **__: session)
    with pytest.raises(OutOfMemoryError, match="at once; the session split it"):
        open_case(spec).call()


def test_our_own_runtime_needs_none_of_the_baselines_packages(workshop: Any) -> None:
    spec = workshop("bert").spec("onnxruntime", 1, 65)
    code = (
        "import pickle, sys\n"
        "from hdexport.bench.run.worker import open_case\n"
        f"open_case(pickle.loads({pickle.dumps(spec)!r})).call()\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'sentence_transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
