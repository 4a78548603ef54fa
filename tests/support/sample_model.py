"""The sample model, all-MiniLM-L6-v2, with fewer layers, and the commands that pages run on it."""

from __future__ import annotations

__all__ = ["SAMPLE_MAX_LEN", "environment", "save_sample_model"]

import json
import os
import re
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from hdexport.checkpoint import default_model

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


def environment() -> dict[str, str]:
    """The environment with the commands of the Python that runs the tests first."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
