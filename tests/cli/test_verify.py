"""`hdexport verify`: one line per check, the outcome in the manifest, exit code 1 where a check fails."""

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


def test_every_check_has_a_line_and_the_outcome_is_recorded(hdexport: Command, copy: Path) -> None:
    done = hdexport("verify", copy)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    lines.remove(
        "-[-] onnxruntime_cuda.onnx: not checked: that needs an NVIDIA GPU "
        "(hdexport verify BUNDLE --backend onnxruntime_cuda)"
    )
    assert all(line.startswith("-[x] ") for line in lines)
    assert last == f"{len(lines)} of {len(lines)} checks passed"
    of_texts = [line for line in lines if line.startswith("-[x] from text, as in transformers: ")]
    assert {line.split(": ")[1] for line in of_texts} > {"short text, tokens 10", "empty text, tokens 2"}
    checked = {int(line.split("tokens ")[1].split(",")[0]) for line in lines if line not in of_texts}
    assert checked == {1, 2, 63, 64, 65, 100}
    verification = hdruntime.open_bundle(copy).manifest.verification
    assert verification is not None
    assert verification["passed"] is True
    shown = hdexport("inspect", copy).stdout
    assert any(line.split() == ["verification", "passed,", "full", "grid"] for line in shown.splitlines())


def test_a_checkpoint_that_differs_fails_and_that_is_recorded(
    hdexport: Command, checkpoint: Path, copy: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"] += 0.01 * torch.arange(32)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    done = hdexport("verify", copy, "--model", other, "--longest", 2)
    assert (done.returncode, done.stderr) == (1, "")
    assert "-[ ] model.onnx: batch 1, tokens 1, padding none: max abs error " in done.stdout
    assert "FAILED: last_hidden_state" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 of ")
    verification = hdruntime.open_bundle(copy).manifest.verification
    assert verification is not None
    assert verification["passed"] is False
    shown = hdexport("inspect", copy).stdout
    assert any(line.split() == ["verification", "FAILED,", "full", "grid"] for line in shown.splitlines())
    failed = [line for line in done.stdout.splitlines() if line.startswith("-[ ]")]
    quiet = hdexport("verify", copy, "--model", other, "--longest", 2, "--quiet")
    assert (quiet.returncode, quiet.stdout.splitlines(), quiet.stderr) == (1, failed, "")
    as_json = json.loads(hdexport("verify", copy, "--model", other, "--longest", 2, "--json").stdout)
    assert as_json["passed"] is False
    assert not any(check["passed"] for check in as_json["checks"])
    assert hdexport("verify", copy, "--longest", 2, "--quiet").stdout == ""


def test_the_quick_grid_as_json_is_the_record_and_its_checks(hdexport: Command, copy: Path) -> None:
    done = hdexport("verify", copy, "--grid", "quick", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    checks, problem = printed.pop("checks"), printed.pop("problem")
    assert (printed, problem) == (hdruntime.open_bundle(copy).manifest.verification, None)
    assert printed["grid"] == "quick"
    assert len(checks) == sum(graph["checks"] for graph in printed["graphs"].values()) < 30
    assert checks[0] == {
        "graph": "model.onnx",
        "precision": "float32",
        "case": {"tokens": 1, "lengths": [1], "padding": "none"},
        "passed": True,
        "max_abs_error": checks[0]["max_abs_error"],
        "min_cosine": pytest.approx(1),
        "tolerance": "max abs error <= 0.0001",
        "samples": None,
        "wrong_decisions": [],
        "text": None,
    }
    assert [check["text"] for check in checks][-1] == "marks"
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
    assert "-[-] lengths above 1: not checked; ask for them with --longest 100" in done.stdout


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
