"""`hdexport rebuild`: new engines from the bundle alone."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from hdexport.engines.build import EngineOptions, previous_engines
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Backend, Manifest, Task
from hdruntime.bundle.reader import open_bundle
from support.tiny_models import save_tiny_model

pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")


@pytest.fixture(scope="module")
def windowed(hdexport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an engine of one architecture that holds our plugin. Not to be changed: copy it."""
    checkpoint, output = (tmp_path_factory.mktemp("windowed") / name for name in ("wide-bert", "bundle"))
    # Heads of 32: the plugin has no kernel for smaller ones.
    save_tiny_model(checkpoint, "bert", Task.FEATURE_EXTRACTION, num_attention_heads=1)
    done = hdexport(
        "build", checkpoint, "--max-len", 100, "--attention", "window:8", "--fp16", "--target", "tensorrt-rtx",
        "--sm", 86, "--profiles", "40,100", "--batch", "1:2:4", "--no-verify", "-o", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture
def copy(windowed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(windowed, tmp_path / "bundle"))


def manifest_of(path: Path) -> Manifest:
    """The manifest of a bundle whose every file is as it says."""
    return open_bundle(path).manifest


def kernels_of(path: Path) -> set[str]:
    return {found[1] for name in manifest_of(path).files if (found := re.match(r"kernels/.*-(sm\d+)-.*cubin", name))}


def test_an_engine_is_rebuilt_for_another_gpu_without_the_checkpoint(hdexport, copy: Path) -> None:
    before = manifest_of(copy)
    assert before.engines[0].architectures == ("sm86",)
    done = hdexport("rebuild", copy, "--sm", "86,120")
    assert (done.returncode, done.stderr) == (0, "")
    after = manifest_of(copy)
    version = after.engines[0].version
    assert done.stdout == f"{copy / 'engines/tensorrt_rtx.engine'}: tensorrt_rtx {version}, sm86, sm120\n"
    assert after.engines[0].architectures == ("sm86", "sm120")
    assert after.engines[0].profiles == before.engines[0].profiles
    metadata = json.loads((copy / after.engines[0].metadata).read_text())
    assert metadata["plugins"] == {"SlidingWindowAttention": 2}
    assert kernels_of(copy) == {"sm86", "sm120"}
    assert after.kernel_architectures == ("sm86", "sm120")
    assert after.kernel_nodes == before.kernel_nodes != ()
    assert after.made_by["rebuilt by"] == f"hdexport rebuild {copy.name} --sm 86,120"
    unchanged = ("model.onnx", "model.onnx.data", "onnxruntime_cpu.onnx", "tokenizer.json", "config.json")
    assert {name: after.files[name] for name in unchanged} == {name: before.files[name] for name in unchanged}
    assert "rebuilt by" in hdexport("inspect", copy).stdout
    # A job continues with it, and not with other weights.
    assert after.files != before.files
    assert identity_of_bundle(after) == identity_of_bundle(before)
    damaged = dict(after.files, **{"model.onnx.data": after.files["model.onnx"]})
    assert identity_of_bundle(dataclasses.replace(after, files=damaged)) != identity_of_bundle(before)


def test_what_is_given_replaces_what_the_engine_had(hdexport, copy: Path, tmp_path: Path) -> None:
    done = hdexport(
        "rebuild", copy, "--attention-impl", "native", "--profiles", 100, "--sm", 86, "-o", tmp_path / "other"
    )
    assert done.returncode == 0, done.stderr
    engine = manifest_of(tmp_path / "other").engines[0]
    assert [profile.tokens for profile in engine.profiles] == [(1, 100, 100)]
    assert json.loads((tmp_path / "other" / engine.metadata).read_text())["plugins"] == {}
    assert kernels_of(tmp_path / "other") == set(), "kernels that no engine is left for"
    assert manifest_of(tmp_path / "other").kernel_nodes == (), "nor does ONNX Runtime look for them"
    assert kernels_of(copy) != set(), "the bundle itself stays as it was"
    # What it had is where the next rebuild starts from.
    kept = previous_engines(open_bundle(tmp_path / "other"), [Backend.TENSORRT_RTX])
    assert kept == EngineOptions(attention_impl=AttentionImpl.NATIVE, profiles=engine.profiles)


def test_kernels_for_a_gpu_that_no_engine_runs_on_are_added_beside_the_engine(hdexport, copy: Path) -> None:
    """As the log line of ONNX Runtime on such a GPU says."""
    before = manifest_of(copy)
    done = hdexport("rebuild", copy, "--target", "onnx", "--sm", 90)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"\n{copy / 'kernels'}: sm86, sm90\n")
    after = manifest_of(copy)
    assert kernels_of(copy) == {"sm86", "sm90"}
    assert (after.engines, after.kernel_nodes) == (before.engines, before.kernel_nodes)
    kept = {name for name in before.files if not name.startswith("kernels/")}
    assert {name: after.files[name] for name in kept} == {name: before.files[name] for name in kept}


def test_a_bundle_without_engines_gets_one(hdexport, bundle: Path, tmp_path: Path) -> None:
    done = hdexport("rebuild", bundle, "--target", "tensorrt-rtx", "--sm", 86, "-o", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert [engine.variant for engine in manifest_of(tmp_path / "other").engines] == ["tensorrt_rtx"]
    assert manifest_of(tmp_path / "other").verification == manifest_of(bundle).verification is not None
    assert manifest_of(bundle).engines == ()


def test_what_cannot_be_rebuilt_is_reported_and_nothing_changes(refused, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    before = (copy / "manifest.json").read_bytes()
    for arguments, message in (
        (["--target", "tensorrt"], r"hdexport\[tensorrt\]|GPU"),
        (
            ["--sm", "86,90"],
            r"does not build for sm90\.\n.*, 121\. Kernels for ONNX Runtime alone are built with --target onnx\.",
        ),
        (["--target", "onnx"], r"the GPUs that --sm names, and there is no --sm\.\nGive for example --sm 90"),
        (["--target", "onnx", "--sm", "90", "--batch", "1:1:8"], "--batch describes an engine, but no engine is built"),
        (["--profiles", "40,200"], "the model is built for 100"),
        (["--version-compatible"], "--version-compatible is for TensorRT engines"),
        (["-o", tmp_path / "taken"], "taken exists"),
    ):
        refused("rebuild", copy, *arguments, message=message)
        assert (copy / "manifest.json").read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "taken"]


def test_a_damaged_bundle_is_not_rebuilt(refused, copy: Path) -> None:
    with (copy / "model.onnx.data").open("r+b") as file:
        file.write(b"\0\1\2\3")
    refused("rebuild", copy, message="model.onnx.data .* has changed")
