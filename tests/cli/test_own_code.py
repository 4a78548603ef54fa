"""The commands on a checkpoint whose model is Python code of its own, which answers otherwise than our class."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from support.commands import Command, Refused
from support.made_once import made_once
from support.tiny_models import change_json, save_sentence_modules, save_tiny_model

CODE = """
from transformers import BertModel

class Twice(BertModel):
    def forward(self, *args, **options):
        found = super().forward(*args, **options)
        found["last_hidden_state"] = found["last_hidden_state"] + 0.5
        return found
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, hdexport: Command) -> Path:
    """A folder with the checkpoint, its bundle, and what the build printed."""

    def build(directory: Path) -> None:
        path = directory / "model"
        save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
        save_sentence_modules(path, pooling={"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
        change_json(path / "config.json", auto_map={"AutoModel": "theirs.Twice"}, architectures=["Twice"])
        (path / "theirs.py").write_text(CODE)
        done = hdexport("build", path, "-o", directory / "bundle", "--target", "onnx")
        (directory / "process.json").write_text(json.dumps(vars(done)))

    return made_once(tmp_path_factory, "own-code", build)


def test_a_build_without_trust_says_whose_answers_the_bundle_gives(built: Path) -> None:
    done = json.loads((built / "process.json").read_text())
    assert done["returncode"] == 0
    (line,) = [line for line in done["stderr"].splitlines() if "auto_map" in line]
    assert "'theirs.Twice' (auto_map of config.json). It was not run: the outputs are those of transformers' " in line


def test_tuning_without_trust_says_what_was_not_run(built: Path, tmp_path: Path, hdexport: Command) -> None:
    options = ["--texts", tmp_path / "missing", "--max-len", 100]
    done = hdexport("tune", built / "model", *options, "-o", tmp_path / "tuned")
    said, error = done.stderr.splitlines()[:2]
    assert "'theirs.Twice' (auto_map of config.json). It was not run: " in said
    assert "missing" in error


@pytest.mark.parametrize("verify", ["none", "quick"])
def test_a_build_with_trust_is_refused(built: Path, tmp_path: Path, refused: Refused, verify: str) -> None:
    options = ["--target", "onnx", "--trust-remote-code", "--verify", verify]
    refused("build", built / "model", "-o", tmp_path / "b", *options, message="'theirs.Twice' .*differ by 0.5 from")
    assert not (tmp_path / "b").exists()


def test_verification_with_trust_records_that_the_code_differs(built: Path, tmp_path: Path, hdexport: Command) -> None:
    bundle = shutil.copytree(built / "bundle", tmp_path / "bundle")
    options = ["--model", built / "model", "--grid", "quick", "--trust-remote-code"]
    done = hdexport("verify", bundle, *options)
    assert done.returncode == 1
    case = "FAIL  code: theirs.Twice  float32  batch 1, 64 tokens, padding none  "
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(case)]
    assert "failed: its outputs for 64 tokens differ by 0.5 from those of transformers' BertModel" in line
    assert "leave --trust-remote-code out" in done.stdout
    record = open_bundle(bundle).manifest.verification
    assert record is not None
    assert record.passed is False
    of_code = record.graphs["code: theirs.Twice"]
    assert (of_code.passed, of_code.checks) == (0, 4)
    assert {case.padding for case in of_code.failed} == {"none", "right", "left"}
    quiet = hdexport("verify", bundle, *options, "-q")
    assert quiet.stdout.count("FAIL  code: theirs.Twice  ") == 4
    assert json.loads(hdexport("verify", bundle, *options, "--json").stdout)["passed"] is False


def test_verification_of_code_that_cannot_run_says_so(built: Path, tmp_path: Path, hdexport: Command) -> None:
    bundle, model = (shutil.copytree(built / name, tmp_path / name) for name in ("bundle", "model"))
    (model / "theirs.py").write_text("import a_package_that_nobody_has\n")
    done = hdexport("verify", bundle, "--model", model, "--grid", "quick", "--trust-remote-code")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("code: theirs.Twice  ")]
    assert "a_package_that_nobody_has" in line
    record = open_bundle(bundle).manifest.verification
    assert record is not None
    assert any("a_package_that_nobody_has" in (skip.detail or "") for skip in record.skipped)


def test_verification_without_trust_says_what_was_not_run(built: Path, hdexport: Command) -> None:
    done = hdexport("verify", built / "bundle", "--model", built / "model", "--grid", "quick")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("code: theirs.Twice  ")]
    assert line.endswith("  not run without --trust-remote-code")
