"""`hdexport verify`: a table, the outcome in the manifest, exit code 1 where a check fails."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hdruntime
from support.commands import Command, Refused
from support.every_key import write_manifest_values
from support.tiny_models import change_json


@pytest.fixture
def copy(bundle: Path, checkpoint: Path, tmp_path: Path) -> Path:
    """A bundle to verify again, its checkpoint beside it; its manifest holds no outcome."""
    (tmp_path / checkpoint.name).symlink_to(checkpoint)
    path = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    write_manifest_values(path, json.loads((path / "manifest.json").read_text()) | {"verification": None})
    return path


NEEDS_GPU = "needs an NVIDIA GPU: hdexport verify BUNDLE --backend onnxruntime_cuda"


def test_a_table_has_a_row_for_each_graph_and_verbose_a_line_for_each_check(hdexport: Command, copy: Path) -> None:
    done = hdexport("verify", copy, "-v")
    assert done.returncode == 0
    skip, *lines, header, model, for_cpu, of_texts, for_gpu = done.stdout.splitlines()
    assert skip == f"SKIP  onnxruntime_cuda.onnx: {NEEDS_GPU}"
    assert for_gpu.endswith(NEEDS_GPU)
    checks = [line.split("  ") for line in lines]
    assert {(check[0], check[2]) for check in checks} == {("PASS", "float32")}
    texts = [case for _, graph, _, case, *_ in checks if graph == "text: transformers"]
    assert set(texts) > {"short text, 10 tokens", "empty text, 2 tokens"}
    cases = [case for _, graph, _, case, *_ in checks if graph == "model.onnx"]
    assert {int(case.split(", ")[1].removesuffix(" tokens")) for case in cases} == {1, 2, 63, 64, 65, 100}
    assert " ".join(header.split()) == "graph precision status cases max abs error min cosine tolerance, or why skipped"
    assert model.split()[:4] == ["model.onnx", "float32", "PASS", str(len(cases))]
    assert for_cpu.split()[:4] == ["onnxruntime_cpu.onnx", "float32", "PASS", str(len(cases))]
    assert of_texts.split()[:5] == ["text:", "transformers", "float32", "PASS", str(len(texts))]
    assert for_gpu.split()[:4] == ["onnxruntime_cuda.onnx", "-", "SKIP", "0"]
    verification = hdruntime.open_bundle(copy).manifest.verification
    assert verification is not None
    assert verification.passed is True
    shown = hdexport("inspect", copy).stdout.splitlines()
    number = 2 * len(cases) + len(texts)
    assert any(line.split() == f"verification passed, full grid, {number} of {number} cases".split() for line in shown)
    assert {header, model, for_cpu, of_texts, for_gpu} <= set(shown)
    quiet = hdexport("verify", copy, "--longest", 2).stdout.splitlines()
    assert [line.split()[0] for line in quiet] == [
        "graph", "model.onnx", "onnxruntime_cpu.onnx", "text:", "onnxruntime_cuda.onnx", "SKIP",
    ]  # fmt: skip


def test_a_checkpoint_that_differs_fails_and_that_is_recorded(
    hdexport: Command, checkpoint: Path, copy: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"] += 0.01 * torch.arange(32)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    done = hdexport("verify", copy, "--model", other, "--longest", 2)
    assert (done.returncode, done.stderr) == (1, "")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL  ")]
    assert failed[0].startswith("FAIL  model.onnx  float32  batch 1, 1 tokens, padding none  max abs error ")
    assert all(line.endswith("  failed: last_hidden_state") for line in failed)
    of_model = sum(line.startswith("FAIL  model.onnx  ") for line in failed)
    assert f"model.onnx float32 FAIL {of_model} of {of_model}" in " ".join(done.stdout.split())
    verification = hdruntime.open_bundle(copy).manifest.verification
    assert verification is not None
    assert verification.passed is False
    shown = hdexport("inspect", copy).stdout
    assert any(line.split()[:4] == ["verification", "FAILED,", "full", "grid,"] for line in shown.splitlines())
    quiet = hdexport("verify", copy, "--model", other, "--longest", 2, "--quiet")
    assert (quiet.returncode, quiet.stdout.splitlines(), quiet.stderr) == (1, failed, "")
    as_json = json.loads(hdexport("verify", copy, "--model", other, "--longest", 2, "--json").stdout)
    assert as_json["passed"] is False
    assert {check["status"] for check in as_json["checks"]} == {"FAIL"}
    assert hdexport("verify", copy, "--longest", 2, "--quiet").stdout == ""


def test_the_quick_grid_as_json_is_the_record_and_its_checks(hdexport: Command, copy: Path) -> None:
    done = hdexport("verify", copy, "--grid", "quick", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    checks, problem = printed.pop("checks"), printed.pop("problem")
    recorded = json.loads((copy / "manifest.json").read_text())["verification"]
    assert (printed, problem) == (recorded, None)
    assert json.loads(hdexport("inspect", copy, "--json").stdout)["manifest"]["verification"] == recorded
    assert recorded["skipped"] == [
        {
            "cause": "no_gpu",
            "graph": "onnxruntime_cuda.onnx",
            "case": None,
            "needed": None,
            "limit": None,
            "backend": "onnxruntime_cuda",
            "detail": None,
        }
    ]
    assert printed["grid"] == "quick"
    assert len(checks) == sum(graph["checks"] for graph in printed["graphs"].values()) < 30
    tolerance = dict.fromkeys(["atol", "ulps", "rtol", "cosine", "length", "token_length", "score_spread"])
    assert checks[0] == {
        "status": "PASS",
        "graph": "model.onnx",
        "precision": "float32",
        "case": {"tokens": 1, "lengths": [1], "padding": "none"},
        "max_abs_error": checks[0]["max_abs_error"],
        "min_cosine": pytest.approx(1),
        "tolerance": tolerance | {"atol": 0.0001, "ulps": 2},
        "failed_outputs": [],
        "samples": None,
        "wrong_decisions": [],
        "error": None,
        "text": None,
        "parts": 1,
    }
    assert [check["text"] for check in checks][-1] == "punctuation"
    assert (
        max(check["max_abs_error"] for check in checks if check["graph"] == "model.onnx")
        == (printed["graphs"]["model.onnx"]["max_abs_error"])
    )


def test_findings_that_cannot_be_recorded_are_printed(
    hdexport: Command, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("hdexport.support.bundle_writer.write_whole", refuse)
    done = hdexport("verify", copy, "--grid", "quick", "--longest", 1, "--json")
    assert json.loads(done.stdout)["passed"] is True
    assert "cannot be written: Read-only file system" in done.stderr
    assert done.returncode == 1


def test_lengths_that_are_left_out_are_reported(hdexport: Command, copy: Path) -> None:
    done = hdexport("verify", copy, "--longest", 1)
    assert done.returncode == 0
    assert "SKIP  all graphs: lengths above 1 tokens; compare them with --longest 100" in done.stdout


def test_a_checkpoint_that_moved_can_be_named(refused: Refused, copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["made_by"]["source"] = "/nowhere/model"
    write_manifest_values(copy, manifest)
    refused("verify", copy, message=r"was built from /nowhere/model, which is not here\.\nName the .* --model MODEL")


def test_another_model_is_refused(refused: Refused, checkpoint: Path, copy: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    change_json(other / "config.json", model_type="ernie")
    before = (copy / "manifest.json").read_bytes()
    message = r"was built from a bert, and .* is a ernie\.\nName the checkpoint it was built from with --model"
    refused("verify", copy, "--model", other, message=message)
    assert (copy / "manifest.json").read_bytes() == before


def test_a_precision_is_verified_alone_or_refused_with_what_to_type(
    hdexport: Command, refused: Refused, copy: Path
) -> None:
    done = hdexport("verify", copy, "--grid", "quick", "--precision", "float32", "--json")
    assert {check["precision"] for check in json.loads(done.stdout)["checks"]} == {"float32"}
    message = r"has no graph that computes in int8 on a CPU\.\nBuild it again with --int8, or leave out --precision"
    refused("verify", copy, "--precision", "int8", message=message)
