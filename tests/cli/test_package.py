"""`hdexport package`, through the installed entry point, of a bundle that was really built."""

from __future__ import annotations

from pathlib import Path

import hdruntime
from support.commands import Command, Refused
from support.tiny_bundle import make_bundle


def test_a_model_is_written_once_with_a_bundle_that_loads(
    installed: Command,
    refused: Refused,
    bundle: Path,
    tmp_path: Path,
) -> None:
    models = tmp_path / "models"
    done = installed("package", bundle, "--triton", models, "--name", "encoder", "--backend", "onnxruntime")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{models}/encoder: a model of Triton's Python backend, whose Python needs hdexport\n"
        f"Serve it: tritonserver --model-repository {models}\n"
    )
    config = (models / "encoder" / "config.pbtxt").read_text()
    assert 'parameters [ { key: "backend" value: { string_value: "onnxruntime" } } ]' in config
    with hdruntime.load(models / "encoder" / "1" / "bundle") as session:
        assert session.max_len == hdruntime.open_bundle(bundle).manifest.max_len
    refused("package", bundle, "--triton", models, "--name", "encoder", message="Replace it with --force")


def test_a_bundle_that_reads_no_texts_is_refused(refused: Refused, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", tokenizer=False)
    refused("package", bundle, "--triton", tmp_path / "models", message="Serve a bundle that reads texts")
    assert not (tmp_path / "models").exists()
