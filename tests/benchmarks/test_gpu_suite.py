"""The GPU suite where there is no GPU: its rehearsal, steps that end badly, and what it makes of what it found."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.gpu import backends, end_to_end, models, operator_nodes, sanitizer, suite
from benchmarks.gpu.cases import FAMILIES
from benchmarks.gpu.cases.window import WindowCase
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.gpu.plans.plan import Plan
from benchmarks.gpu.repository_tests import gpu_tests
from benchmarks.gpu.steps import STEPS, Step
from benchmarks.gpu.table import (
    ALL_ON_CPU,
    ON_GPU,
    VECTORS,
    answer_verdicts,
    findings_of,
    growth_verdicts,
    peer_verdicts,
)
from fakes.simulated_cuda import write_simulated_kernels
from fakes.stand_in_driver import StandInDriver, build_stand_in
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.onnxruntime.operators import KernelOperators
from hdruntime.backends.registry import this_machine
from hdruntime.bundle.reader import Bundle
from support.interpreted_kernel import Interpreter

ROOT = Path(__file__).parents[2]

_FAKE_SCRIPT = """
import ctypes, json, sys, time
step, output = sys.argv[2], open(sys.argv[4], "a")
if step == "shipped-kernels":
    output.write('{"step": "half a li')
    output.flush()
    time.sleep(60)
print(json.dumps({"step": step, "rehearsal": False, "case": "a row"}), file=output, flush=True)
if step == "ceilings":
    ctypes.string_at(0)
said = {"onnxruntime": {"skipped": True, "reason": "no package"}}
said["long-answers"] = {"status": "failed", "reason": "wrong"}
print(json.dumps(said.get(step, {"status": "ok"})))
"""
_REHEARSED_CASES = {
    "longformer-our-kernel": ["answers", "latency", "graph"],
    "block-kernels-d64": [
        "bigbird", "FlexAttention bigbird", "bigbird, table", "FlexAttention bigbird, table",
        "torch SDPA dense, cuDNN",
    ],
    "onnxruntime-kernels": ["answers", "onnxruntime", *["answers"] * 3, "onnxruntime"],
    "onnxruntime-dense": [
        "answers", "onnxruntime", *["answers"] * 3, "onnxruntime", "answers", "latency", "graph",
    ],
    "onnxruntime-answers": ["answers", "onnxruntime"],
    "onnxruntime-windows": ["answers", "onnxruntime"],
    "onnxruntime-blocks": ["answers", "onnxruntime"],
    "shipped-kernels": ["shipped kernels"] * len(FAMILIES),
    "operator-nodes": ["operator nodes"] * 2 * len(FAMILIES),
    "machine": ["machine"],
}  # fmt: skip
_REHEARSED_CASES |= dict.fromkeys(
    ("bert-sdpa", "longformer-flex", "longformer-hugging-face"), _REHEARSED_CASES["longformer-our-kernel"]
)
_FAKED = ("machine", "ceilings", "shipped-kernels", "onnxruntime", "long-answers")


@pytest.fixture
def job(tmp_path: Path) -> Any:
    return Job(step="bert-sdpa", output=tmp_path / "rows.jsonl", rehearsal=True)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_a_gpu_every_step_of_the_block_index_is_skipped_for_that_reason_and_it_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked, lines in (("--minutes 28", len(STEPS)), ("kernels blocks --tune", 1)):
        monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *asked.split(), "--output", str(tmp_path / "rows.jsonl")])
        assert suite.main("A suite.") == 3
        printed = capsys.readouterr()
        assert [("no GPU: " in line, line.endswith("PyTorch finds none")) for line in printed.out.splitlines()] == [
            (True, True)
        ] * lines
        assert printed.err == ""
        assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.nightly
def test_a_rehearsal_runs_steps_to_their_end_and_claims_no_time(tmp_path: Path) -> None:
    """The kernel, interpreted, in a whole model; the kernels of a bundle, all but started."""
    pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--output", output, "--steps", *_REHEARSED_CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(output)
    assert {row["rehearsal"] for row in rows} == {True}
    ends = {row["step"]: row["status"] for row in rows if row["case"] == "step"}
    assert ends == dict.fromkeys(_REHEARSED_CASES, "ok")
    for step, cases in _REHEARSED_CASES.items():
        found = [row for row in rows if row["step"] == step and row["case"] != "step"]
        assert [row["case"] for row in found] == cases
        assert all(row.get("problem") is None and row.get("passed", True) for row in found)
        assert all(row["status"] == "ok" for row in found if row["case"] in ("latency", "graph"))
    assert "none of which is a result" in done.stdout
    assert "TFLOP/s" not in done.stdout


def test_a_step_that_crashes_hangs_or_fails_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, output = tmp_path / "fake.py", tmp_path / "rows.jsonl"
    script.write_text(_FAKE_SCRIPT)
    output.write_text('{"step": "of an earlier run"}\n')
    # The one that hangs is not waited for; two of them run side by side.
    steps = [
        Step(
            name,
            1.0 if name == "shipped-kernels" else 60.0,
            "which GPU it is",
            "",
            estimate_s=0.5,
            is_timed=name not in ("machine", "long-answers"),
        )
        for name in _FAKED
    ]
    monkeypatch.setitem(suite.PLANS, "all", Plan(proves="", limit_s=600, steps=tuple(steps)))
    monkeypatch.setattr(suite, "why_no_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--output", str(output)])
    assert suite.main("A suite.", [str(script)]) == 1
    printed = capsys.readouterr()
    ends = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert "SIGSEGV" in ends.pop("ceilings")
    assert ends.pop("shipped-kernels").startswith("timeout")
    proved = "which GPU it is"
    assert ends == {
        "machine": f"ok          {proved}",
        "onnxruntime": "skipped     no package",
        "long-answers": "failed      wrong",
    }
    assert "half a line was left" in printed.err
    kept = [json.loads(line) for line in output.read_text().splitlines() if line.endswith("}") and "half" not in line]
    assert sorted(row["step"] for row in kept if row.get("case") == "a row") == [
        "ceilings",
        "long-answers",
        "machine",
        "onnxruntime",
    ]


@pytest.fixture
def restored_attention() -> Iterator[None]:
    """Variants replace the attention of their process, which is this one here."""
    import hdexport.attention.window.model
    import hdexport.families.longformer

    node = hdexport.attention.window.model.sliding_window_node
    yield
    hdexport.attention.window.model.sliding_window_node = node
    hdexport.families.longformer.sliding_window_node = node


@pytest.mark.parametrize(("model", "window"), [("bert-base", "our kernel, window"), ("longformer-base", "our kernel")])
def test_attention_that_sees_a_token_too_many_is_a_wrong_answer(
    model: str, window: str, job: Any, monkeypatch: pytest.MonkeyPatch, restored_attention: None
) -> None:
    from hdplugins.attention.window.reference import sliding_window_attention

    def wider(*tensors: Any, left: int, **attributes: Any) -> Any:
        return sliding_window_attention(*tensors, left=left + 1, **attributes)

    monkeypatch.setattr(models, "_OurKernel", lambda: wider)
    with pytest.raises(StepFailedError, match="a wrong answer: cosine"):
        end_to_end.measure(job, model, window)
    assert [row["case"] for row in rows_of(job.output)] == ["answers"]


@pytest.mark.parametrize("model", ["bert-base", "longformer-base"])
def test_the_kernels_read_projections_where_they_are_and_block_index_once_a_pass(
    model: str, monkeypatch: pytest.MonkeyPatch, restored_attention: None
) -> None:
    calls: list[tuple[bool, bool]] = []

    def launched(operator: Any, inputs: Any, out: Any, scratch: Any, *, has_block_index: bool, **_: Any) -> None:
        assert scratch.keys() == {"block_index"}
        calls.append((has_block_index, all(state.is_contiguous() for state in (*inputs[:3], out))))
        out.fill_(0)

    monkeypatch.setattr(models, "launch", launched)
    monkeypatch.setattr(models, "architecture_of", lambda device: 90)
    sizes = dataclasses.replace(models.sizes_of(rehearsal=True), layers=3)
    call = models.prepare(model, "our kernel", sizes=sizes, device="cpu")
    with torch.inference_mode():
        for _ in range(2):
            call(torch.full((2, 21), 7))
    assert calls == 2 * [(False, True), (True, True), (True, True)]


def test_running_out_of_memory_is_a_result_and_a_graph_that_fails_ends_the_graphs(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    not_captured = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    shapes = [(1, 21), (1, 22)]
    monkeypatch.setattr(end_to_end, "_shapes", lambda *_: iter(shapes))
    monkeypatch.setattr(end_to_end, "time_runs", no_memory)
    monkeypatch.setattr(end_to_end, "times_ms", not_captured)
    end_to_end.measure(job, "bert-base", "torch sdpa")
    _, *rows = rows_of(job.output)
    assert [(row["case"], row["tokens"], row["status"]) for row in rows] == [
        ("latency", 21, "OOM"),
        ("graph", 21, "failed"),
        ("latency", 22, "OOM"),
    ]
    assert "20.00 GiB" in rows[0]["reason"]
    assert "stream is capturing" in rows[1]["reason"]
    monkeypatch.setattr(end_to_end, "time_runs", not_captured)
    with pytest.raises(RuntimeError, match="stream is capturing"):
        end_to_end.measure(job, "bert-base", "torch sdpa")


def test_what_the_sanitizer_finds_fails_its_step(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = dataclasses.replace(job, rehearsal=False)
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setattr(sanitizer.shutil, "which", lambda _: str(tool))
    for status, said in ((0, "0 errors"), (9, "1 error")):
        tool.write_text(f"#!/bin/sh\necho '========= ERROR SUMMARY: {said}'\nexit {status}\n")
        tool.chmod(0o755)
        with pytest.raises(StepFailedError, match=r"memcheck ended with 9: .*1 error") if status else nullcontext():
            sanitizer.check(on_gpu, "memcheck")
    assert [row["exit_code"] for row in rows_of(job.output)] == [0, 9]
    monkeypatch.setattr(sanitizer.shutil, "which", lambda _: None)
    with pytest.raises(SkippedError, match="is not installed"):
        sanitizer.check(on_gpu, "memcheck")


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("suite")
    job = Job(step="onnxruntime", output=folder / "rows.jsonl", rehearsal=True)
    return backends._built(folder, job, variant=None, is_windowed=False)


@pytest.fixture
def given(job: Any, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job, and a bundle that every step takes as it is."""
    monkeypatch.setattr(backends, "_bundle", lambda *_, **__: nullcontext(tiny_bundle))
    return job


def test_onnxruntime_is_compared_with_the_answers_of_the_cpu(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backends.run_onnxruntime(given)
    (row,) = rows_of(given.output)
    assert (row["passed"], row["tokens"], row["provider"]) == (True, 128, "onnxruntime")
    compared = backends.compare
    monkeypatch.setattr(backends, "compare", lambda got, want, **how: compared(got[:, ::-1], want, **how))
    with pytest.raises(StepFailedError, match="wrong answers at 128 tokens"):
        backends.run_onnxruntime(given)
    if this_machine().gpu is None:
        with pytest.raises(SkippedError, match=r"CUDA finds no GPU"):
            backends.run_onnxruntime(dataclasses.replace(given, rehearsal=False))


def test_a_refusal_of_tensorrt_is_recorded_word_by_word(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import hdexport.graph.targets.tensorrt.packages
    from hdruntime.errors import EngineError

    refusal = EngineError("sm_90 is not supported.\nUse another")
    monkeypatch.setattr(hdexport.graph.targets.tensorrt.packages, "load_variant", Mock(side_effect=refusal))
    with pytest.raises(SkippedError, match="sm_90 is not supported"):
        backends.run_engine(given, "tensorrt", is_windowed=True)
    (row,) = rows_of(given.output)
    assert (row["variant"], row["status"], row["reason"]) == ("tensorrt", "refused", str(refusal))
    (line,) = findings_of([row | {"rehearsal": False}])
    assert line.endswith(f", tensorrt with our plugin: refused: {refusal}")


def test_kernels_that_answer_otherwise_than_the_bodies_are_an_error(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Mock(side_effect=backends.compare)
    monkeypatch.setattr(backends, "compare", compared)
    backends.compare_kernels(job, "longformer-base")
    ends = [(row["case"], row["attention"], row.get("right")) for row in rows_of(job.output)]
    of_kernels = [("answers", "kernels", right) for right in ("cpu", "bodies", "bodies")]
    assert ends == [
        ("answers", "bodies", "cpu"), ("onnxruntime", "bodies", None), *of_kernels, ("onnxruntime", "kernels", None),
    ]  # fmt: skip
    line = list(findings_of([row | {"rehearsal": False} for row in rows_of(job.output)]))[-1]
    assert line.startswith("longformer-base, onnxruntime by kernels, hidden states to the CPU, 1 x 128: ")
    most, compare = 2 * compared.call_count, compared.side_effect

    def compare_but_the_last(*arguments: Any, **options: Any) -> Any:
        """The last one is of kernels with bodies."""
        return dataclasses.replace(compare(*arguments, **options), passed=compared.call_count < most)

    compared.side_effect = compare_but_the_last
    with pytest.raises(StepFailedError, match="a wrong answer"):
        backends.compare_kernels(job, "longformer-base")


@pytest.mark.parametrize(
    ("model", "is_windowed"),
    [
        ("longformer-base", False),
        pytest.param("bert-base", True, marks=pytest.mark.nightly),
        pytest.param("bigbird-base", False, marks=pytest.mark.nightly),
    ],
)
def test_answers_left_on_the_gpu_are_right_or_an_error(
    model: str, is_windowed: bool, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal, whose answers on the GPU are the CPU's times a factor."""
    factor, answers_of = [1], backends._answers

    def answers(*arguments: Any, **options: Any) -> Any:
        ((name, call),) = answers_of(*arguments, **options).items()
        return {name: call, ON_GPU: lambda: {"last_hidden_state": call()["last_hidden_state"] * factor[0]}}

    monkeypatch.setattr(backends, "_answers", answers)
    backends.time_answers(job, model, is_windowed=is_windowed)
    rows = rows_of(job.output)
    assert [(row["case"], row["answers"]) for row in rows] == [
        (case, answers) for case in ("answers", "onnxruntime") for answers in (ALL_ON_CPU, ON_GPU)
    ]
    factor[0] = -1
    with pytest.raises(StepFailedError, match="a wrong answer"):
        backends.time_answers(job, model, is_windowed=is_windowed)


def test_goals_of_answers_are_judged_on_the_gpu_that_they_are_for() -> None:
    def row(answers: str, batch: int, p50_ms: float) -> dict[str, Any]:
        return {
            "case": "onnxruntime", "model": "longformer-base", "answers": answers, "status": "ok", "batch": batch,
            "tokens": 4096, "p50_ms": p50_ms, "rehearsal": False,
        }  # fmt: skip

    rows = [row(ON_GPU, 1, 5.0), row(ON_GPU, 8, 22.01), row(ALL_ON_CPU, 8, 26.0), row(VECTORS, 8, 22.3)]
    assert list(answer_verdicts(rows, "NVIDIA H100")) == []
    assert list(answer_verdicts(rows, "NVIDIA H200")) == [
        "longformer-base, hidden states on the GPU, 1 x 4096: 5.00 ms, target 5: met",
        "longformer-base, hidden states on the GPU, 8 x 4096: 22.01 ms, target 22: MISSED",
        "longformer-base, hidden states to the CPU, 8 x 4096: 26.00 ms, target 27: met",
        "longformer-base, vectors to the CPU, 8 x 4096: +0.29 ms, target 0.3: met",
    ]
    assert "MISSED" in list(answer_verdicts([rows[1], row(VECTORS, 8, 22.4)], "H200"))[-1]
    (line,) = (line for line in findings_of([*rows[:1], {"gpu": "H100", "rehearsal": False}]) if "longformer" in line)
    assert line == "longformer-base, None, hidden states on the GPU, 1 x 4096: 5.00 ms"


def test_a_bundle_is_judged_beside_the_peer_of_its_step() -> None:
    shape = {"model": "bert-base", "status": "ok", "batch": 8, "tokens": 4096, "rehearsal": False}
    ours = {"case": "onnxruntime", "answers": ON_GPU, "step": "onnxruntime-dense", **shape}
    compiled = {"case": "latency", "variant": "torch.compile", **shape}
    rows = [
        ours | {"attention": "bodies", "p50_ms": 30.0},
        ours | {"attention": "kernels", "p50_ms": 25.0},
        ours | {"attention": "kernels", "p50_ms": 40.0, "answers": ALL_ON_CPU},
        compiled | {"step": "onnxruntime-dense", "p50_ms": 23.0},
        compiled | {"step": "bert-compile", "p50_ms": 1.0},
    ]
    assert list(peer_verdicts(rows)) == [
        "bert-base by bodies, 8 x 4096: 1.30 of the time of torch.compile, 23.00 ms",
        "bert-base by kernels, 8 x 4096: 1.09 of the time of torch.compile, 23.00 ms, target 1.1: met",
    ]
    rows[1]["p50_ms"] = 26.5
    assert list(peer_verdicts(rows))[1].endswith("target 1.1: MISSED")
    assert list(answer_verdicts(rows, "NVIDIA H200")) == [
        "bert-base, hidden states on the GPU, 8 x 4096: 26.50 ms, target 26: MISSED"
    ]
    assert not list(peer_verdicts(rows[:3]))


class _ShortWindows(WindowCase):
    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[WindowCase]:
        shape = {"batch": 2, "heads": 2, "tokens": 33, "head_dim": head_dim, "dtype": dtype}
        yield cls(**shape, left=5, right=3, global_bound=8)


def test_a_node_that_answers_otherwise_than_its_definition_fails_the_step(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_nodes, "FAMILIES", {"windows": _ShortWindows})
    operator_nodes.check(job)
    assert [(row["dtype"], row["problem"]) for row in rows_of(job.output)] == [("float16", None), ("float32", None)]
    right = operator_nodes.difference
    monkeypatch.setattr(
        operator_nodes, "difference", lambda case, tensors, found: right(case, tensors, found.roll(1, 1))
    )
    with pytest.raises(StepFailedError, match="2 wrong answers, the first: windows, float16: "):
        operator_nodes.check(job)


@pytest.mark.nightly
def test_nodes_are_checked_by_kernels(tmp_path: Path) -> None:
    """On a stand-in for the driver: as on a GPU, but for the provider."""
    with Interpreter() as interpreter:
        launches = interpreter.run(_nodes_by_kernels, build_stand_in(tmp_path), tmp_path / "rows.jsonl")
    assert launches == ["index_keys", "attend", "attend"] * 2
    assert {row["problem"] for row in rows_of(tmp_path / "rows.jsonl")} == {None}


def _nodes_by_kernels(stand_in: Path, output: Path) -> list[str]:
    driver = StandInDriver(stand_in)

    def write(folder: Path, case: Any, tensors: Any, *, architecture: int) -> None:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        sources = plugin_spec_of(case.OPERATOR).kernel_sources(
            shapes, case.attributes, dtype=case.dtype, architectures=[86], block_config=case.REHEARSED_BLOCK_CONFIG
        )
        write_simulated_kernels(folder, case.OPERATOR.name, sources)

    class OnCpu(Job):
        device = "cpu"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(operator_nodes, "FAMILIES", {"windows": _ShortWindows})
        patched.setattr(operator_nodes, "_HEAD_DIM", 32)
        patched.setattr(operator_nodes, "CUDA_PROVIDER", "CPUExecutionProvider")
        patched.setattr(
            operator_nodes, "KernelOperators", functools.partial(KernelOperators, provider="CPUExecutionProvider")
        )
        patched.setattr(operator_nodes, "write_shipped", write)
        operator_nodes.check(OnCpu(step="operator-nodes", output=output, rehearsal=False))
    return driver.launches


def test_the_block_index_for_half_an_hour_leaves_no_step_out_and_says_what_each_proves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = max(step.budget_s for step in STEPS if not step.is_timed)
    assert longest + sum(step.budget_s for step in STEPS if step.is_timed) <= suite.PLANS["all"].limit_s <= 30 * 60
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--list"])
    assert suite.main("A suite.") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [step.name for step in STEPS]
    assert [line.split()[2] for line in lines[:2]] == ["machine", "gpu-tests"], "right answers come first"
    assert all(line.endswith(step.proves) and step.proves for line, step in zip(lines, STEPS, strict=True))


@pytest.mark.parametrize(("most", "verdict"), [(1200, "met"), (1700, "MISSED")])
def test_memory_that_grows_with_the_square_of_tokens_is_missed(most: int, verdict: str) -> None:
    row = {"case": "onnxruntime", "model": "bert-base, windows", "answers": ON_GPU, "status": "ok", "batch": 1}
    peaks = {4096: 300, 8192: 600, 16384: most}
    rows = [row | {"tokens": tokens, "vram_bytes": 10**6 * peak} for tokens, peak in peaks.items()]
    (line,) = growth_verdicts(rows)
    assert line.endswith(f"+{most - 600} MB, target 2.5 times as much: {verdict}")
    assert not list(growth_verdicts(rows[1:]))


def test_every_file_with_a_test_for_gpus_is_run_on_one() -> None:
    names = {Path(file).name for file in gpu_tests()}
    assert {
        "test_distance_kernel.py", "test_sparse_kernel.py", "test_cuda_launch.py",
        "test_gpu.py", "test_onnxruntime_cuda.py", "test_ceilings.py", "test_baselines.py", "test_memory.py",
    } <= names  # fmt: skip


def test_the_time_for_all_steps_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    monkeypatch.setattr(suite, "why_no_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--output", str(output), "--minutes", "0.05"])
    assert suite.main("A suite.", ["there is no such script"]) == 0
    rows = rows_of(output)
    assert {row["status"] for row in rows} == {"not started"}
    assert rows[0]["reason"].startswith("it takes 5 s, and ")
    assert rows[0]["reason"].endswith(" s of 0.05 minutes were left")
    assert capsys.readouterr().out.count("not started") == len(STEPS)


def test_what_a_step_raises_is_in_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--step", "machine", "--output", str(tmp_path / "rows.jsonl")])
    for error, said in (
        (SkippedError("no engine"), {"skipped": True, "reason": "no engine"}),
        (ModuleNotFoundError(name="onnx"), {"skipped": True, "reason": "the package 'onnx' is not installed"}),
        (StepFailedError("wrong"), {"status": "failed", "reason": "wrong"}),
    ):
        raising = {"machine": SimpleNamespace(run=Mock(side_effect=error))}
        monkeypatch.setattr(suite, "_steps_by_name", lambda plan, found=raising: found)
        assert suite.main("A suite.") == 0
        assert json.loads(capsys.readouterr().out) == said
    raising["machine"].run.side_effect = ZeroDivisionError("a mistake")
    with pytest.raises(ZeroDivisionError):
        suite.main("A suite.")
