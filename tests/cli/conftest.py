"""The installed `hdexport`, a tiny checkpoint, and a bundle that was built of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hdexport.tasks import Task
from tiny_models import save_tiny_model

Command = Callable[..., subprocess.CompletedProcess[str]]

MAX_LEN = 100
"""Longest input of the built bundle; the checkpoint has 64 positions."""


def _run(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hdexport")), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )


@pytest.fixture(scope="session")
def hdexport() -> Command:
    """Run the installed command: (*arguments, cwd=None, **environment) -> the finished process."""
    return _run


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Run a command that must fail as errors of ours do: exit code 1, a message that matches, no traceback."""

    def check(*arguments: object, message: str, cwd: Path | None = None, **environment: str) -> str:
        done = _run(*arguments, cwd=cwd, **environment)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert re.search(rf"^error: (.|\n)*(?:{message})", done.stderr, re.MULTILINE), done.stderr
        return done.stdout

    return check


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT of 64 positions, with its tokenizer. Not to be changed: copy it."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-bert"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    return path


@pytest.fixture(scope="session")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The finished `hdexport build` of the tiny BERT; `bundle` is what it wrote."""
    output = tmp_path_factory.mktemp("bundles") / "tiny"
    # Beside the bundle, where commands that compare it with PyTorch look for a checkpoint of that name.
    (output.parent / checkpoint.name).symlink_to(checkpoint)
    return _run("build", checkpoint, "--max-len", MAX_LEN, "--target", "onnx", "-o", output)


@pytest.fixture(scope="session")
def bundle(built: subprocess.CompletedProcess[str]) -> Path:
    """The tiny BERT's bundle, of 100 positions. Not to be changed: copy it."""
    assert built.returncode == 0, built.stderr
    return Path(built.args[-1])
