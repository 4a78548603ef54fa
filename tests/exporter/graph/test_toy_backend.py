"""A backend from a folder of its own goes through every command; no file of the product knows it.

The folders `toy_backend/backends/toy` and `toy_backend/targets/toy` are what a backend adds to `hdruntime.backends` and
`hdexport.graph.targets`. They are CONTRIBUTING's recipe for a backend.
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

import hdexport.graph.targets
import hdruntime
import hdruntime.backends
from hdexport.bench.run.plan import BenchOptions, plan
from hdexport.graph.targets.registry import targets
from hdexport.support.bundle_writer import seal
from hdruntime.backends.registry import backends
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.manifest_json import manifest_from_json
from support.commands import run_here
from support.tiny_models import save_tiny_model

FOLDER = Path(__file__).with_name("toy_backend")


@contextlib.contextmanager
def toy_added() -> Iterator[None]:
    """The toy's folders are among those of the registries."""
    with pytest.MonkeyPatch.context() as patch:
        for package in (hdruntime.backends, hdexport.graph.targets):
            folder = FOLDER / package.__name__.rpartition(".")[2]
            patch.setattr(package, "__path__", [*package.__path__, str(folder)])
        try:
            backends.cache_clear()
            targets.cache_clear()
            yield
        finally:
            backends.cache_clear()
            targets.cache_clear()


def command(*words: object, has_toy: bool = True) -> subprocess.CompletedProcess[str]:
    """A command, with the toy or without."""
    with toy_added() if has_toy else contextlib.nullcontext():
        return run_here(*words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, and where bundles go: `verify` and `bench` look for a checkpoint beside them."""
    path = tmp_path_factory.mktemp("toy")
    save_tiny_model(path / "model", "bert", Task.FEATURE_EXTRACTION)
    return path


@pytest.fixture(scope="module")
def built(folder: Path) -> subprocess.CompletedProcess[str]:
    return command("build", folder / "model", "--target", "toy", "--max-len", 80, "-o", folder / "bundle")


@pytest.fixture(scope="module")
def bundle(folder: Path, built: subprocess.CompletedProcess[str]) -> Path:
    assert built.returncode == 0, built.stderr
    return folder / "bundle"


def test_it_is_built_and_verified(bundle: Path, built: subprocess.CompletedProcess[str]) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert [graph["lowering"] for graph in manifest["graphs"]][-1] == "toy"
    record = manifest["verification"]["graphs"]["toy.onnx"]
    assert record["checks"] == record["passed"] > 5
    assert "toy.onnx" in built.stdout


def test_auto_takes_it_and_its_answers_are_onnx_runtimes(bundle: Path) -> None:
    ids = np.arange(10, 40).reshape(2, 15)
    mask = np.ones_like(ids)
    mask[1, 9:] = 0
    with toy_added():
        for backend, device in (("auto", "cpu"), ("toy", None)):
            with hdruntime.load(bundle, backend, device=device) as session:
                assert session.backend == "toy"
                found = session(input_ids=ids, attention_mask=mask)["last_hidden_state"]
        with pytest.raises(hdruntime.InputError, match=r"it must be one of auto, .*, toy, "):
            hdruntime.load(bundle, "toys")
    with hdruntime.load(bundle, "onnxruntime") as session:
        expected = session(input_ids=ids, attention_mask=mask)["last_hidden_state"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_job_runs_by_it(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4\n")
    for backend in ("toy", "auto"):
        output = tmp_path / f"{backend}.jsonl"
        done = command("run", bundle, tmp_path / "texts.txt", "-o", output, "--backend", backend)
        assert done.returncode == 0, done.stderr
        assert len(output.read_text().splitlines()) == 2
    assert "Backend: toy in float32. " in done.stdout
    refused = command("run", bundle, tmp_path / "texts.txt", "-o", output, "--backend", "toy", has_toy=False)
    assert refused.returncode == 1
    assert "invalid choice: 'toy'" in refused.stderr


def test_inspect_and_doctor_show_it(bundle: Path) -> None:
    lines = command("inspect", bundle).stdout.splitlines()
    found = json.loads(command("doctor", "--json").stdout)["results"]
    assert any(line.split()[:3] == ["toy.onnx", "toy", "float32"] for line in lines)
    (line,) = [finding for finding in found if finding["component"] == "The toy"]
    assert (line["status"], line["detail"]) == ("ok", onnx.__version__)


def test_verify_finds_a_wrong_graph(bundle: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    other = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    done = command("verify", other, "--grid", "quick", "--backend", "toy")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert set(json.loads((other / "manifest.json").read_text())["verification"]["graphs"]) == {"toy.onnx"}
    model = onnx.load(other / "toy.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Softmax").op_type = "LogSoftmax"
    onnx.save(model, other / "toy.onnx")
    seal(other, manifest_from_json((other / "manifest.json").read_bytes()))
    done = command("verify", other, "--grid", "quick", "--backend", "toy")
    assert done.returncode == 1
    assert "\nFAIL  " in f"\n{done.stdout}"


def test_rebuild_adds_its_graph(folder: Path, bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    done = command("rebuild", bundle, "-o", tmp_path / "rebuilt", "--target", "toy")
    assert done.returncode == 0, done.stderr
    assert "toy.onnx: not yet verified" in done.stdout
    rebuilt = json.loads((tmp_path / "rebuilt" / "manifest.json").read_text())
    assert rebuilt["files"]["toy.onnx"] == manifest["files"]["toy.onnx"]


def test_a_benchmark_plans_it(bundle: Path) -> None:
    with toy_added():
        found = plan(BenchOptions(bundles=(bundle,), lengths=(16,), baselines=()))
    planned = {each.series.runner: each for each in found.series}
    assert planned["toy"].is_available
    assert (planned["toy"].device, planned["toy"].series.name) == ("cpu", "bundle (toy)")


def test_without_the_toy_the_others_run_and_it_is_said_what_is_not_checked(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    other = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    assert command("inspect", other, has_toy=False).returncode == 0
    done = command("verify", other, "--grid", "quick", has_toy=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("toy.onnx")]
    assert " SKIP " in line
    assert line.endswith("not installed: the target that wrote the lowering toy")
    with pytest.raises(hdruntime.InputError, match="backend is 'toy'"):
        hdruntime.load(bundle, "toy")
