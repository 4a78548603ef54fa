"""`hdexport bench` from a bundle to its page, and installed where it is stopped or killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import psutil
import pytest

from hdexport.bench.baselines import BASELINES
from hdexport.bench.measure.processes import ProcessOutcome
from hdexport.bench.results.result import BenchResult, RunStatus
from hdexport.bench.run import preparation, rounds
from hdexport.cli.bench import BASELINE_NAMES
from hdexport.support.bundle_writer import seal, write_manifest
from hdruntime.bundle.reader import open_bundle
from support.commands import HDEXPORT, Command, Refused
from support.waiting import wait_until

TOKENS = 65
TORCH, OURS, WRONG, COMPILED = "torch", "tiny (onnxruntime)", "wrong (onnxruntime)", "torch-compile"
IN_ONE_PROCESS = """
import sys
from hdexport.bench.measure.processes import ProcessOutcome
from hdexport.bench.results.result import RunStatus
from hdexport.bench.page import html
from hdexport.bench.run import preparation
from hdexport.cli import main
html.charts = lambda result, batch: {}
preparation.run_function = lambda call, *, time_limit_s: (ProcessOutcome(status=RunStatus.OK), call())
sys.exit(main(sys.argv[1:]))
"""
"""The command without processes that prepare and without charts, most of the work of a run that measures little."""


@pytest.fixture(scope="module")
def lone_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose checkpoint is not here."""
    path = shutil.copytree(bundle, tmp_path_factory.mktemp("lone") / "tiny")
    manifest = open_bundle(path).manifest
    write_manifest(path, dataclasses.replace(manifest, made_by={"source": "/gone"}))
    return path


@pytest.fixture(scope="module")
def wrong_bundle(lone_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with other weights in a layer."""
    path = shutil.copytree(lone_bundle, tmp_path_factory.mktemp("wrong") / "wrong")
    weights = ir.load(path / "model.onnx").graph.initializers
    changed = weights["model.encoder.layer.0.output.dense.weight.transposed"].const_value
    assert isinstance(changed, ir.ExternalTensor)
    assert changed.offset is not None
    data = bytearray((path / "model.onnx.data").read_bytes())
    data[changed.offset : changed.offset + changed.nbytes] = (2 * changed.numpy()).tobytes()
    (path / "model.onnx.data").write_bytes(data)
    seal(path, open_bundle(path, check_files=False).manifest)
    return path


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Prepare in this process, which has PyTorch; time cases for 0.1 s; draw no charts.

    What is left out has tests of its own in tests/exporter/bench.
    """

    def draw(folder: Path, result: BenchResult) -> None:
        (folder / "latency.png").write_bytes(b"\x89PNG")

    def run_here(call: Callable[[], object], *, time_limit_s: float) -> tuple[ProcessOutcome, object]:
        return ProcessOutcome(status=RunStatus.OK), call()

    patch.setattr(preparation, "run_function", run_here)
    patch.setattr(rounds, "_MIN_SECONDS", 0.1)
    patch.setattr("hdexport.bench.write.write_pngs", draw)
    patch.setattr("hdexport.bench.page.html.charts", lambda result, batch: {})


@pytest.fixture(scope="module")
def measured(
    hdexport: Command,
    lone_bundle: Path,
    wrong_bundle: Path,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, str]:
    """The directory of a whole run, which finds the checkpoint only by its option, and what it printed."""
    folder = tmp_path_factory.mktemp("bench") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        shorten(patch)
        done = hdexport(
            "bench", lone_bundle, wrong_bundle, "--model", checkpoint, "--lengths", TOKENS,
            "--batch", "3", "--baselines", "torch,torch-compile", "--rounds", "1", "--time-limit", "60",
            "--threads", "1", "--png", "-o", folder,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_every_series_is_measured_and_only_the_wrong_one_is_wrong(measured: tuple[Path, str]) -> None:
    result = json.loads((measured[0] / "bench.json").read_text())
    assert {(case["series"], case["batch"], case["tokens"]) for case in result["cases"]} == {
        (series, 3, TOKENS) for series in (TORCH, OURS, WRONG)
    }
    for case in result["cases"]:
        assert case["status"] == "ok"
        latency = case["latency"]
        assert 0 < latency["min_ms"] <= latency["p50_ms"] <= latency["p95_ms"] <= latency["p99_ms"] <= latency["max_ms"]
        assert latency["runs"] >= 10
        assert latency["runs"] * latency["mean_ms"] >= 100
        assert len(latency["rounds_p50_ms"]) == 1
        assert case["tokens_per_s"] == pytest.approx(3 * case["tokens"] / latency["p50_ms"] * 1e3)
        assert case["memory"]["rss_bytes"] > case["memory"]["growth_bytes"] >= 0
        assert case["error"]["passed"] == (case["series"] != WRONG)
        assert (case["error"]["max_abs_error"] > 1e-3) == (case["series"] == WRONG)
        assert case["series"] == WRONG or case["error"]["max_abs_error"] < 1e-4


@pytest.mark.slow
def test_the_recorded_command_is_the_one_that_ran_and_names_no_folder(measured: tuple[Path, str]) -> None:
    command = json.loads((measured[0] / "bench.json").read_text())["command"]
    assert command.startswith("hdexport bench tiny wrong --model tiny-bert --lengths ")


@pytest.mark.slow
def test_table_and_page_have_every_case_and_what_is_missing(measured: tuple[Path, str]) -> None:
    folder, printed = measured
    result = json.loads((folder / "bench.json").read_text())
    assert [series["name"] for series in result["series"]] == [OURS, WRONG, TORCH, COMPILED]
    page = (folder / "bench.html").read_text()
    for text in (re.sub(r"\s+", " ", printed), page):
        assert all(name in text for name in (OURS, WRONG, TORCH, str(TOKENS)))
        assert "torch.compile needs a C++ compiler, no-such-compiler: apt-get install g++" in text
    assert str(folder / "bench.html") in printed
    assert (folder / "latency.png").read_bytes() == b"\x89PNG"


@pytest.mark.slow
def test_stopped_with_ctrl_c_it_writes_what_it_has(lone_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_ONE_PROCESS, "bench", lone_bundle, "--lengths", "8", "--baselines", "none"]
    process = subprocess.Popen(
        [*command, "--rounds", "1000", "--threads", "1", "-o", tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(process.pid, "worker", 2)  # the second begins when a round has ended
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # where the signal did not; its workers end with it
    assert process.returncode == 130, errors
    assert re.search(rf"^interrupted: \d+ rounds are kept in {tmp_path / 'out'}$", errors, re.MULTILINE)
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert 1 <= len(result["cases"][0]["latency"]["rounds_p50_ms"]) < 1000
    assert "stopped early" in " ".join(result["notes"])
    assert "bench.html" in printed
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_killed_it_leaves_no_process_and_the_next_run_removes_the_rest_and_a_time_limit_is_a_result(
    hdexport: Command, lone_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", lone_bundle, "--lengths", "8,100", "--baselines", "none", "-o", tmp_path / "out"]
    process = subprocess.Popen([HDEXPORT, *arguments, "--rounds", "1000"])
    try:
        children = [psutil.Process(pid) for pid in wait_for(process.pid, "preparation", 1)]
    finally:
        process.kill()
        process.wait()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    monkeypatch.setattr("hdexport.bench.page.html.charts", lambda result, batch: {})
    done = hdexport(*arguments, "--time-limit", "0.05")
    assert done.returncode == 1, done.stderr  # nothing at all was measured
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.html", "bench.json"]
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(case["tokens"], case["status"]) for case in result["cases"]] == [(8, "timeout"), (100, "timeout")]
    assert "was built from gone, which was not found" in result["notes"][0]


def wait_for(pid: int, module: str, count: int) -> set[int]:
    """Pids of the first so many processes beneath that one which run that module of `hdexport.bench.run`."""
    found: set[int] = set()

    def have_begun() -> bool:
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(part.startswith(f"hdexport.bench.run.{module}:") for part in process.cmdline()[:4]):
                    found.add(process.pid)
        return len(found) >= count

    wait_until(have_begun, seconds=90)
    return found


def test_the_help_names_every_baseline() -> None:
    assert list(BASELINES) == list(BASELINE_NAMES)


def test_results_are_replaced_only_by_force(refused: Refused, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text("{}")
    refused("bench", bundle, cwd=tmp_path, message="--force")
    assert (tmp_path / "bench" / "bench.json").read_text() == "{}"


REFUSED = [
    ([], "No bundle was given.\nName a bundle"),
    (["BUNDLE", "--lengths", "101"], "--lengths contains 101; the bundles accept 1 to 100 tokens."),
    (["BUNDLE", "--batch", "0"], "argument --batch: '0' is not a whole number, 1 or more\nSee: hdexport bench --help"),
    (
        ["BUNDLE", "--baselines", "tf"],
        "'tf' is not a baseline; valid: torch, torch-compile, onnx-plain, all, none.",
    ),
    (["BUNDLE", "--time-limit", "-1"], "--time-limit is -1.0; it must be a positive number of seconds."),
]
"""Options -> what is said of them."""


def test_bad_options_are_refused_before_anything_is_measured(refused: Refused, bundle: Path, tmp_path: Path) -> None:
    for options, message in REFUSED:
        words = (bundle if option == "BUNDLE" else option for option in options)
        refused("bench", *words, cwd=tmp_path, message=message)
        assert not os.listdir(tmp_path), options
