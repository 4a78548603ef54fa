"""`hdexport package`, through the installed entry point, of a bundle that was really built."""

from __future__ import annotations

import re
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
    model = tmp_path / "models" / "encoder"
    done = installed("package", bundle, "--for", "triton", "-o", model, "--backend", "onnxruntime")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "Not compared with the bundle: the package runs the bundle itself, in hdexport's runtime.\n"
        f"{model}: for Triton Inference Server\n"
        f"Next: tritonserver --model-repository REPOSITORY, the directory that holds {model}; its Python needs "
        "hdexport.\n"
    )
    config = (model / "config.pbtxt").read_text()
    assert 'parameters [ { key: "backend" value: { string_value: "onnxruntime" } } ]' in config
    with hdruntime.load(model / "1" / "bundle") as session:
        assert session.max_len == hdruntime.open_bundle(bundle).manifest.max_len
    refused("package", bundle, "--for", "triton", "-o", model, message="Replace it with --force")


def test_every_text_is_compared_and_what_does_not_fit_is_refused_in_flags(
    hdexport: Command, refused: Refused, bundle: Path, tmp_path: Path
) -> None:
    done = hdexport("package", bundle, "--for", "onnx", "-o", tmp_path / "onnx", "--opset", 19, "--ir-version", 9)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:4]] == ["1", "20", "600", "3000"]
    assert len(re.findall(r" words, float32: \w+ has the cosine 1\.0000", done.stdout)) == 4
    place = ("-o", tmp_path / "other")
    refused("package", bundle, "--for", "triton", *place, "--opset", 19, message="Leave out --opset")
    refused("package", bundle, "--for", "onnx", *place, "--opset", 16, message="--opset is 16; it must be 17 to 20")
    refused("package", bundle, "--for", "onnx", *place, "--prompt-name", "query", message="Leave out --prompt-name")
    assert not (tmp_path / "other").exists()


def test_a_bundle_that_reads_no_texts_is_refused(refused: Refused, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", tokenizer=False)
    for target in ("triton", "onnx"):
        refused("package", bundle, "--for", target, "-o", tmp_path / "out", message="has no tokenizer")
    assert not (tmp_path / "out").exists()
