"""The sample model, all-MiniLM-L6-v2: with fewer layers, and as the bundle that the tutorial builds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from hdexport.checkpoint import default_model
from support.commands import run_here
from support.made_once import made_once
from support.pages import page

SAMPLE_MAX_LEN = 640
"""Positions of the bundles of the whole sample model; the model itself has 512."""


def save_sample_model(directory: Path, num_layers: int) -> None:
    """Write the sample model's checkpoint up to its first `num_layers` layers."""
    sample = Path(default_model()[0])
    shutil.copytree(sample, directory, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((sample / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    kept = {
        name: weights
        for name, weights in load_file(sample / "model.safetensors").items()
        if not (layer := re.search(r"\.layer\.(\d+)\.", name)) or int(layer[1]) < num_layers
    }
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


def build_of_the_tutorial() -> str:
    """The command of docs/tutorial.md that builds ``minilm``, of the sample model."""
    (command,) = re.findall(r"^hdexport build .* -o minilm$", page("docs/tutorial.md"), re.MULTILINE)
    return str(command)


def tutorial_bundle(factory: pytest.TempPathFactory) -> Path:
    """The bundle of that command, built once for all workers; not verified and without an engine. Not to be changed."""

    def build(directory: Path) -> None:
        words = shlex.split(build_of_the_tutorial())[1:]
        done = run_here(*words, "--target", "onnx", "--verify", "none", cwd=directory)
        assert done.returncode == 0, done.stderr

    return made_once(factory, "tutorial-bundle", build) / "minilm"


def environment() -> dict[str, str]:
    """The environment with the commands of the Python that runs the tests first."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
