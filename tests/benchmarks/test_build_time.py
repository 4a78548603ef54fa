"""The benchmark of builds: a run of the script with quick commands, figures of processes, and one real export."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from benchmarks.cpu import build_time

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_the_figures_are_those_of_the_whole_process() -> None:
    idle = build_time.process_figures(python("import time; time.sleep(0.3)"))
    assert idle["latency_ms"] >= 300
    assert idle["cpu_ms"] < idle["latency_ms"]
    busy = build_time.process_figures(python("sum(range(10_000_000))"))
    assert busy["cpu_ms"] > idle["cpu_ms"] + 30


def test_the_peak_is_that_of_the_process() -> None:
    """Asked for from a small process, as the script does: this one has PyTorch loaded."""
    script = (
        "import sys\nfrom benchmarks.cpu import build_time\n"
        "for code in ('pass', 'kept = bytes(1) * 300_000_000', 'kept = b\"x\" * 300_000_000; del kept'):\n"
        "    print(build_time.process_figures([sys.executable, '-I', '-S', '-c', code])['growth_bytes'])"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    small, large, past = map(int, run.stdout.split())
    assert small < 150e6
    assert 300e6 < large < 330e6
    assert 300e6 < past < 330e6


def test_a_command_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match=r"(?s)-c .*: exit status 3\nno weights\n"):
        build_time.process_figures(python("print('no weights'); raise SystemExit(3)"))


def save_scaling(path: Path, factor: float) -> None:
    """An ONNX file that answers [batch, tokens, 8] floats."""
    model = f"""
        <ir_version: 10, opset_import: ["": 20]>
        scaling (int64[batch, tokens] input_ids) => (float[batch, tokens, 8] last_hidden_state)
        <int64[1] axis = {{2}}, float[1, 8] weight = {{{", ".join([str(factor)] * 8)}}}>
        {{
            ids = Cast <to = 1> (input_ids)
            column = Unsqueeze (ids, axis)
            last_hidden_state = MatMul (column, weight)
        }}
    """
    onnx.save(onnx.parser.parse_model(model), path)


@pytest.fixture
def run_script(rehearse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script with commands that take a good tenth of a second and copy an ONNX file."""
    seconds = {"build": 0.1, "plain": 0.3, "verified": 0.2, "optimum": 0.1}

    def command(kind: str, checkpoint: Path, output: Path) -> list[str]:
        copy = f"import os, shutil, time; os.makedirs({str(output)!r}, exist_ok=True); "
        model = tmp_path / ("wrong.onnx" if kind == "plain" and (tmp_path / "wrong.onnx").exists() else "model.onnx")
        refuse = "raise SystemExit('optimum says no')" if kind == "optimum" and checkpoint.name == "sample" else ""
        sleep = f"time.sleep({seconds[kind]}); "
        return python(copy + sleep + f"shutil.copy({str(model)!r}, {str(output / 'model.onnx')!r}); " + refuse)

    save_scaling(tmp_path / "model.onnx", 1.0)
    monkeypatch.setattr(build_time, "_command", command)
    monkeypatch.setattr(build_time, "_save_checkpoint", lambda shape, directory, **_: None)
    monkeypatch.setattr(build_time.shutil, "which", lambda name: name)
    return lambda: rehearse(build_time, "--shapes sample longformer")


def test_every_case_is_measured_and_divided(run_script: Any) -> None:
    result, printed = run_script()
    kinds = {"build": 100, "plain": 300, "verified": 200, "optimum": 100}
    expected = {f"{shape} {kind}" for shape in ("sample", "longformer") for kind in kinds} - {"sample optimum"}
    assert set(result["cases"]) == expected
    for case, figures in result["cases"].items():
        assert kinds[case.split()[1]] <= figures["latency_ms"]
        assert figures["growth_bytes"] > 1e6
    latency, *_ = result["ratios"]
    assert (latency["case"], latency["against"]) == ("sample build", "sample plain")
    build, plain = (result["cases"][f"sample {kind}"]["latency_ms"] for kind in ("build", "plain"))
    assert latency["median"] == pytest.approx(build / plain)
    assert len(result["ratios"]) == 6
    assert result["without_optimum"] == {"sample": "optimum says no"}
    assert "sample optimum: not measured: optimum says no" in printed.err


def test_a_plain_export_that_answers_otherwise_is_not_measured(run_script: Any, tmp_path: Path) -> None:
    save_scaling(tmp_path / "wrong.onnx", 1.001)
    with pytest.raises(SystemExit, match="sample plain gives a wrong answer: it differs from sample build by"):
        run_script()


def test_without_optimum_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_time.shutil, "which", lambda name: None)
    assert build_time._optimum_refusal(tmp_path) == "optimum-cli is not on the PATH"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plain_export_of_a_process_of_its_own_answers_as_a_build(tmp_path: Path) -> None:
    from hdexport.build import BuildOptions, build
    from hdexport.model.tasks import Task

    build_time._save_checkpoint("bert", tmp_path / "bert", hidden_size=64, layers=1)
    task = Task(build_time.TASK)
    build(BuildOptions(model=tmp_path / "bert", output=tmp_path / "bundle", max_len=512, task=task, verify=None))
    plain = build_time._measured(Namespace(case="bert plain", models=tmp_path))
    ours = build_time._answer(tmp_path / "bundle" / "model.onnx")
    assert len(ours) == 5 * 8
    np.testing.assert_allclose(plain["answer"], ours, atol=1e-4)
    assert max(map(abs, ours)) > 0.1
