"""A trained embedder, and what it answers to texts of up to 3 000 words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hdruntime
from hdexport.package.check import sample_texts
from support.commands import run_here


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the sample model for 4096 tokens, in float16. Not to be changed."""
    path = tmp_path_factory.mktemp("embedder") / "bundle"
    options = ("--max-len", "4096", "--fp16", "--target", "onnx", "--verify", "none")
    done = run_here("build", *options, "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def embeddings(embedder: Path) -> np.ndarray:
    """What the bundle answers to the sample texts, float32 [texts, hidden]."""
    with hdruntime.load(embedder, "onnxruntime") as session:
        return session.embed([text for _, text in sample_texts()])
