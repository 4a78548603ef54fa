"""An attention type that is one more folder of hdexport.attention goes through every command.

The folder `toy_attention_type/every_kth` is CONTRIBUTING's recipe for an attention type. No other file names it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import hdexport.attention
import hdruntime
from hdexport.attention.registry import attention_types
from hdruntime.bundle.manifest import Task
from support.attention_type_checks import assert_attention_types_conform
from support.commands import run_here
from support.every_key import write_manifest_values
from support.needs import needs_rtx
from support.tiny_models import save_tiny_model

FOLDER = Path(__file__).with_name("toy_attention_type")


@contextlib.contextmanager
def toy_registered() -> Iterator[None]:
    """The toy's folder is beside the folders of hdexport's attention types."""
    hdexport.attention.__path__.append(str(FOLDER))
    attention_types.cache_clear()
    try:
        yield
    finally:
        hdexport.attention.__path__.remove(str(FOLDER))
        attention_types.cache_clear()


def command(*words: object, registered: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of a hdexport with the toy, or without it."""
    with toy_registered() if registered else contextlib.nullcontext():
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
    return command("build", folder / "model", *options, "-o", folder / "bundle")


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
    assert positions.startswith("Positions: hierarchical, alpha 0.05 ("), "queries are not scaled"
    assert said.startswith("Attention is cut to every 3. token, which the model was not trained with")
    assert header.split()[:4] == ["graph", "precision", "status", "cases"]
    assert model.split()[:3] == ["model.onnx", "float32", "PASS"]
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert 7 in manifest["verification"]["graphs"]["model.onnx"]["tokens"]
    assert manifest["attention"] == [{"type": "every_kth", "step": 3, "layers": 2}]
    assert manifest["operators"] == {}
    assert [engine["variant"] for engine in manifest["engines"]] == ["tensorrt_rtx"]
    assert {node.domain for node in onnx.load(bundle / "model.onnx", load_external_data=False).graph.node} == {""}


@needs_rtx
def test_every_length_of_the_full_grid_is_verified(bundle: Path) -> None:
    done = command("verify", bundle, "-v")
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
    done = command("verify", other)
    assert done.returncode == 1
    assert "\nFAIL  " in f"\n{done.stdout}"


@needs_rtx
def test_inspect_and_rebuild_know_it(bundle: Path, tmp_path: Path) -> None:
    lines = command("inspect", bundle).stdout.splitlines()
    assert "attention      standard operators" in lines
    assert "steps          every query sees every 3. token, in 2 layers" in lines
    done = command("rebuild", bundle, "-o", tmp_path / "rebuilt", "--target", "tensorrt-rtx", "--profiles", "50,100")
    assert done.returncode == 0, done.stderr


@needs_rtx
@pytest.mark.nightly
def test_it_is_benchmarked(bundle: Path, tmp_path: Path) -> None:
    options = ["--lengths", "16,64", "--rounds", "1", "--baselines", "torch", "--threads", "1"]
    done = command("bench", bundle, *options, "-o", tmp_path / "bench")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench" / "bench.json").read_text())
    remarks = [series["remark"] for series in result["series"] if series["is_baseline"]]
    assert remarks == ["knows no steps: its attention is dense"]
    ours = [case for case in result["cases"] if case["series"].endswith("(onnxruntime)")]
    assert [case["status"] for case in ours] == ["ok", "ok"]


@needs_rtx
def test_the_runtime_runs_it_without_the_type(bundle: Path, tmp_path: Path) -> None:
    """The outputs are not those of dense attention."""
    texts = tmp_path / "texts.txt"
    texts.write_text("w1 w2 w3\n" + " ".join(f"w{index}" for index in range(90)) + "\n")
    done = command("run", bundle, texts, "-o", tmp_path / "vectors.jsonl", registered=False)
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
def test_an_unknown_type_is_named(bundle: Path) -> None:
    done = command("inspect", bundle, registered=False)
    assert done.returncode == 1
    assert "attention type 'every_kth'; known here: dense, window, blocks" in done.stderr


def test_conformance_tests_find_it_and_no_file_outside_its_folder_names_it() -> None:
    with toy_registered():
        assert "every_kth" in [type_.name for type_ in attention_types()]
        assert_attention_types_conform()
    root = Path(__file__).parents[3]
    folders = ("exporter", "runtime", "plugins", "tests", "benchmarks")
    naming = [file for folder in folders for file in (root / folder).rglob("*.py") if "every_kth" in file.read_text()]
    assert {file.relative_to(Path(__file__).parent).parts[0] for file in naming} == {FOLDER.name, Path(__file__).name}


def test_the_command_line_has_its_syntax(folder: Path, tmp_path: Path) -> None:
    assert "every:k=2: tokens at regular distances" in " ".join(command("build", "--help").stdout.split())
    assert "every:k=K" in command("build", "--help-attention").stdout
    refused = command("build", folder / "model", "--attention", "every:k=0", "-o", tmp_path / "bundle")
    assert refused.returncode == 1
    assert "--attention every:k=0 has k 0; it must be 1 or more.\nFor example: --attention every:k=2" in refused.stderr
    assert not (tmp_path / "bundle").exists()


def test_queries_that_it_would_not_scale_are_refused(folder: Path, tmp_path: Path) -> None:
    options = ["--max-len", "100", "--attention", "every:k=3", "--attention-scale", "logn"]
    refused = command("build", folder / "model", *options, "-o", tmp_path / "bundle")
    assert refused.returncode == 1
    said = "--attention-scale logn cannot scale the queries of attention 'every_kth'.\nUse --attention-scale none."
    assert said in refused.stderr
    assert not (tmp_path / "bundle").exists()
