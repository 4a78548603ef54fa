"""The commands that measure beside other products, and that read results of `hdexport bench`, from a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OURS = "bundle (onnxruntime)"


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
    )


@pytest.fixture(scope="module")
def measured(tiny_bundles: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A bundle, and the output of `benchmarks.lengths` for it beside OpenVINO."""
    bundle, folder = tiny_bundles("bert"), tmp_path_factory.mktemp("lengths") / "out"
    options = ["--lengths", "16", "--rounds", "1", "--threads", "1", "--backends", "onnxruntime", "-o", folder]
    done = run("lengths", bundle.path, "--model", bundle.checkpoint, "--baselines", "openvino", *options)
    assert done.returncode == 0, done.stderr
    return bundle, folder


@pytest.mark.slow
def test_another_product_is_measured_in_processes_of_its_own(measured: tuple[Any, Path]) -> None:
    result = json.loads((measured[1] / "bench.json").read_text())
    assert [(case["series"], case["status"]) for case in result["cases"]] == [(OURS, "ok"), ("openvino", "ok")]
    assert all(case["error"]["passed"] for case in result["cases"])
    assert result["command"].startswith("python -m benchmarks.lengths bundle --model ")


@pytest.mark.nightly
def test_a_result_is_held_to_the_roofline_of_the_machine(measured: tuple[Any, Path]) -> None:
    bundle, folder = measured
    done = run("roofline", bundle.path, folder)
    assert done.returncode == 0, done.stderr
    assert "GFLOP/s" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if OURS in line]
    assert row.rstrip().endswith("%")


@pytest.mark.slow
def test_a_slower_result_is_found_and_named(measured: tuple[Any, Path], tmp_path: Path) -> None:
    result = json.loads((measured[1] / "bench.json").read_text())
    files = []
    for name, factor in (("before", 1), ("after", 3)):
        for case in result["cases"]:
            p50_ms = case["latency"]["p50_ms"] * (factor if case["series"] == OURS else 1)
            # The noise of a busy machine is not what is tested here.
            case["latency"].update(p50_ms=p50_ms, rounds_p50_ms=[p50_ms, 1.01 * p50_ms])
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(result))
    printed = run("compare", *files)
    assert f"{OURS}, 1 x 16: latency" in printed.stdout
    compared = json.loads(run("compare", *files, "--json").stdout)
    assert {(change["case"][0], change["kind"]) for change in compared["changes"]} == {(OURS, "latency")}
    refused = run("compare", tmp_path / "none.json", files[0])
    assert (refused.returncode, refused.stderr.startswith("error: There is no ")) == (1, True)


@pytest.mark.slow
def test_the_largest_batch_of_a_budget_is_found(tiny_bundles: Any) -> None:
    bundle = tiny_bundles("bert")
    options = ["--lengths", "16", "--max-batch", "2", "--model", bundle.checkpoint]
    for budget, batch in (("4GB", "2 or more"), ("2MB", "0")):
        done = run("largest_batch", bundle.path, "--memory", budget, *options)
        assert done.returncode == 0, done.stderr
        (row,) = [line for line in done.stdout.splitlines() if OURS in line]
        assert f" {batch} " in row
