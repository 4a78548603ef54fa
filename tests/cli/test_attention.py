"""`hdexport build --attention`: what it makes, what it says, and that bad input leaves nothing behind."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

import hdruntime
from hdexport.attention.registry import attention_types
from hdexport.attention.window import Window, WindowAttention
from support.attention_records import recorded
from support.commands import Command, Refused


@pytest.fixture(scope="module")
def windowed(hdexport: Command, checkpoint: Path, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The tiny BERT with a window of 20 tokens on each side, and what its build printed."""
    path = tmp_path_factory.mktemp("windowed") / "bundle"
    # Where `verify` looks for a checkpoint of that name.
    (path.parent / checkpoint.name).symlink_to(checkpoint)
    options = ("--max-len", 100, "--target", "onnx", "--attention", "window:20,global:2", "-v", "-o", path)
    return path, hdexport("build", checkpoint, *options)


def test_a_windowed_build_says_that_answers_change_and_is_verified_case_by_case(windowed) -> None:
    _, done = windowed
    assert done.returncode == 0, done.stderr
    _, _, said, *checks = done.stdout.splitlines()
    assert said.startswith("Attention is cut to windows of 20 tokens on each side, which the model was not trained")
    assert "fine-tuning is expected" in said
    for case in ("42 tokens, padding right", "42 tokens, padding left", "100 tokens, padding none"):
        assert sum(case in line for line in checks) == 2, case
    for graph in ("model.onnx", "onnxruntime_cpu.onnx"):
        cases = sum(line.startswith(f"PASS  {graph}  float32  batch ") for line in checks)
        assert sum(line.split()[:4] == [graph, "float32", "PASS", str(cases)] for line in checks) == 1


def test_a_windowed_bundle_runs(hdexport: Command, windowed, tmp_path) -> None:
    path, _ = windowed
    texts = tmp_path / "texts.txt"
    texts.write_text("w1 w2 w3\n" + " ".join(f"w{index}" for index in range(90)) + "\n")
    output = tmp_path / "vectors.jsonl"
    done = hdexport("run", path, texts, "-o", output)
    assert done.returncode == 0, done.stderr
    assert len(output.read_text().splitlines()) == 2
    window = Window(tokens=20, global_tokens=2, dilation=(1,))
    expected = WindowAttention(layers=(20, 20), converted=window)
    assert recorded(hdruntime.open_bundle(path).manifest, "window") == expected


REFUSED = [
    (
        ("--attention", "window"),
        r"--attention window has an invalid part: 'window'.\nThe syntax is one of\n  window:W\[,right:R\]",
    ),
    (("--attention", "blocks:file=nowhere.npz,block=4"), "nowhere.npz"),
]
"""Options -> what is said of them."""


def test_bad_input_is_refused_and_nothing_is_written(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    for options, message in REFUSED:
        refused("build", checkpoint, *options, "--target", "onnx", "-o", tmp_path / "bundle", message=message)
        assert not any(tmp_path.iterdir()), options


def test_the_help_has_the_grammar_and_the_options_of_every_attention_type(hdexport: Command) -> None:
    shown, of_syntaxes = (hdexport("build", option).stdout for option in ("--help", "--help-attention"))
    # Lines are broken between words, and words of a sentence at their hyphens.
    text, of_all = "".join(shown.split()), "".join(of_syntaxes.split())
    assert "Longformer's attention_window counts both sides: its 512 is W = 256" in " ".join(of_syntaxes.split())
    found = set()
    for type_ in attention_types():
        for syntax in type_.syntaxes.values():
            assert "".join(f"{syntax.example}: {syntax.summary}".split()) in text
            assert "".join(f"{syntax.grammar} {syntax.help}.".split()) in of_all
            found.add(re.split(r"[:\[]", syntax.grammar)[0])
        parser = argparse.ArgumentParser(add_help=False)
        type_.add_arguments(parser.add_argument_group("attention"))
        for action in parser._actions:
            found.update(action.option_strings)
            assert "".join(f"{action.option_strings[0]} {action.metavar} {action.help}".split()) in text
    options = {"--max-global", "--bigbird-last-block", "--global-embeddings"}
    assert found >= {"window", "bigbird", "etc", "blocks"} | options
