"""A kind of attention from a folder of its own goes through every command; no file of the product knows it.

The folder `toy_kind` is what somebody else's package would be: code, and an entry point of the group
hdexport.attention. It is CONTRIBUTING's recipe for a kind of attention.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

import hdruntime
from hdexport.attention.kinds import kinds
from hdruntime.bundle.manifest import Task
from support.commands import run_here, run_installed
from support.every_key import write_manifest_values
from support.installed import package_installed
from support.kind_checks import assert_kinds_conform
from support.needs import needs_rtx
from support.tiny_models import save_tiny_model

FOLDER = Path(__file__).with_name("toy_kind")


toy_installed = functools.partial(package_installed, FOLDER, kinds)


def hdexport(*words: object, installed: bool = True) -> subprocess.CompletedProcess[str]:
    """A command, where the package with the toy is installed or is not."""
    with toy_installed() if installed else contextlib.nullcontext():
        return run_here(*words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, and where bundles go: `verify` and `bench` look for a checkpoint beside them."""
    path = tmp_path_factory.mktemp("toy")
    save_tiny_model(path / "model", "bert", Task.FEATURE_EXTRACTION)
    return path


@pytest.fixture(scope="module")
def built(folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["--max-len", 100, "--target", "onnx", "--target", "tensorrt-rtx", "--sm", 86, "--attention", "every:k=3"]
    return hdexport("build", folder / "model", *options, "-o", folder / "bundle")


@pytest.fixture(scope="module")
def bundle(folder: Path, built: subprocess.CompletedProcess[str]) -> Path:
    assert built.returncode == 0, built.stderr
    assert len(built.stderr.splitlines()) == 1, built.stderr
    warning = built.stderr
    assert "trained with 64 positions" in warning
    return folder / "bundle"


@needs_rtx
def test_it_is_built_and_verified_with_an_engine(bundle: Path, built: subprocess.CompletedProcess[str]) -> None:
    _, positions, said, header, model, *_ = built.stdout.splitlines()
    assert positions.startswith("Positions: hierarchical, alpha 0.05: "), "queries are not scaled"
    assert said.startswith("Attention is cut to every 3. token, which the model was not trained with")
    assert header.split()[:4] == ["graph", "precision", "status", "cases"]
    assert model.split()[:3] == ["model.onnx", "float32", "PASS"]
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert 7 in manifest["verification"]["graphs"]["model.onnx"]["tokens"]
    assert manifest["attention"] == [{"kind": "every_kth", "step": 3, "layers": 2}]
    assert manifest["operators"] == {}
    assert [engine["variant"] for engine in manifest["engines"]] == ["tensorrt_rtx"]
    assert {node.domain for node in onnx.load(bundle / "model.onnx", load_external_data=False).graph.node} == {""}


@needs_rtx
def test_every_length_of_the_full_grid_is_verified(bundle: Path) -> None:
    done = hdexport("verify", bundle, "-v")
    assert done.returncode == 0, (done.stdout, done.stderr)
    for tokens in (1, 3, 4, 7, 63, 64, 65, 100):
        for graph in ("model.onnx", "onnxruntime_cpu.onnx"):
            line = f"PASS  {graph}  float32  batch 1, {tokens} tokens, padding none"
            assert done.stdout.count(line) == 1, (graph, tokens)


@needs_rtx
def test_another_step_than_was_built_is_seen(bundle: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    other = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["attention"][0]["step"] = 2
    write_manifest_values(other, manifest)
    done = hdexport("verify", other)
    assert done.returncode == 1
    assert "\nFAIL  " in f"\n{done.stdout}"


@needs_rtx
def test_inspect_and_rebuild_know_it(bundle: Path, tmp_path: Path) -> None:
    """And so does the installed command, which finds the package by itself."""
    with toy_installed():
        lines = run_installed("inspect", bundle).stdout.splitlines()
    assert "attention      standard operators" in lines
    assert "steps          every query sees every 3. token, in 2 layers" in lines
    done = hdexport("rebuild", bundle, "-o", tmp_path / "rebuilt", "--target", "tensorrt-rtx", "--profiles", "50,100")
    assert done.returncode == 0, done.stderr


@needs_rtx
@pytest.mark.nightly
def test_it_is_benchmarked(bundle: Path, tmp_path: Path) -> None:
    options = ["--lengths", "16,64", "--rounds", "1", "--baselines", "torch", "--threads", "1"]
    done = hdexport("bench", bundle, *options, "-o", tmp_path / "bench")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench" / "bench.json").read_text())
    remarks = [series["remark"] for series in result["series"] if series["is_baseline"]]
    assert remarks == ["knows no steps: its attention is dense"]
    ours = [case for case in result["cases"] if case["series"].endswith("(onnxruntime)")]
    assert [case["status"] for case in ours] == ["ok", "ok"]


@needs_rtx
def test_the_runtime_runs_it_and_knows_nothing_of_it(bundle: Path, tmp_path: Path) -> None:
    """Without the package, and with answers that dense attention would not give."""
    texts = tmp_path / "texts.txt"
    texts.write_text("w1 w2 w3\n" + " ".join(f"w{index}" for index in range(90)) + "\n")
    done = hdexport("run", bundle, texts, "-o", tmp_path / "vectors.jsonl", installed=False)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 2
    with hdruntime.load(bundle, backend="onnxruntime") as session:
        ids = np.arange(10, 30)[None]
        states = session(input_ids=ids)["last_hidden_state"]
        changed = ids.copy()
        changed[0, 4] = 40
        moved = np.abs(session(input_ids=changed)["last_hidden_state"] - states)[0].max(axis=1) > 1e-6
    # Tokens 1, 4, 7, ... see token 4; the others see none that does.
    assert [index for index in range(20) if moved[index]] == list(range(1, 20, 3))


@needs_rtx
def test_without_its_package_it_is_named(bundle: Path) -> None:
    done = hdexport("inspect", bundle, installed=False)
    assert done.returncode == 1
    assert "attention of the kind 'every_kth'; known here: dense, window, blocks" in done.stderr


def test_conformance_tests_find_it_and_no_file_outside_its_folder_names_it() -> None:
    with toy_installed():
        assert [kind.name for kind in kinds()][-1] == "every_kth"
        assert_kinds_conform()
    root = Path(__file__).parents[3]
    folders = ("exporter", "runtime", "plugins", "tests", "benchmarks")
    naming = [file for folder in folders for file in (root / folder).rglob("*.py") if "every_kth" in file.read_text()]
    assert {file.relative_to(Path(__file__).parent).parts[0] for file in naming} == {FOLDER.name, Path(__file__).name}


def test_the_command_line_has_its_form(folder: Path, tmp_path: Path) -> None:
    assert "every:k=2: tokens at regular distances" in " ".join(hdexport("build", "--help").stdout.split())
    assert "every:k=K" in hdexport("build", "--help-attention").stdout
    refused = hdexport("build", folder / "model", "--attention", "every:k=0", "-o", tmp_path / "bundle")
    assert refused.returncode == 1
    assert "asks for k 0; it must be 1 or more.\nFor example: --attention every:k=2" in refused.stderr
    assert not (tmp_path / "bundle").exists()


def test_queries_that_it_would_not_scale_are_refused(folder: Path, tmp_path: Path) -> None:
    options = ["--max-len", "100", "--attention", "every:k=3", "--attention-scale", "logn"]
    refused = hdexport("build", folder / "model", *options, "-o", tmp_path / "bundle")
    assert refused.returncode == 1
    said = "--attention-scale logn cannot scale the queries of attention 'every_kth'.\nUse --attention-scale none."
    assert said in refused.stderr
    assert not (tmp_path / "bundle").exists()
