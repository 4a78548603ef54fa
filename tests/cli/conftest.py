"""The commands in this process and installed, a tiny checkpoint, and its bundle."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hdruntime.bundle.manifest import Task
from support.commands import Command, run_here, run_installed
from support.made_once import made_once
from support.tiny_models import save_tiny_model

MAX_LEN = 100
"""Longest input of the built bundle; the checkpoint has 64 positions."""


def _run(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_installed(*arguments, cwd=cwd, **environment) if environment else run_here(*arguments, cwd=cwd)


@pytest.fixture(scope="session")
def hdexport() -> Command:
    """Run a command in this process, which saves its imports: (*arguments, cwd=None) -> as a finished process.

    Errors that it does not turn into a message are raised here. With an environment, it runs the installed command.
    """
    return _run


@pytest.fixture(scope="session")
def installed() -> Command:
    """Run the installed command: (*arguments, cwd=None, **environment) -> the finished process."""
    return run_installed


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Run a command, as `hdexport` does, that must fail with exit code 1, a message that matches and no traceback."""

    def check(*arguments: object, message: str, cwd: Path | None = None, **environment: str) -> str:
        done = _run(*arguments, cwd=cwd, **environment)
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr, done
        assert re.search(rf"^error: (.|\n)*(?:{message})", done.stderr, re.MULTILINE), done
        return done.stdout

    return check


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT of 64 positions, with its tokenizer. Not to be changed: copy it."""

    def save(directory: Path) -> None:
        save_tiny_model(directory / "tiny-bert", "bert", Task.FEATURE_EXTRACTION)

    return made_once(tmp_path_factory, "cli-checkpoint", save) / "tiny-bert"


@pytest.fixture(scope="session")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The finished `hdexport build` of the tiny BERT; `bundle` is what it wrote."""

    def build(directory: Path) -> None:
        output = directory / "bundles" / "tiny"
        output.parent.mkdir()
        # Beside the bundle, where commands that compare it with PyTorch look for a checkpoint of that name.
        (output.parent / checkpoint.name).symlink_to(checkpoint)
        done = run_here("build", checkpoint, "--max-len", MAX_LEN, "--target", "onnx", "-o", output)
        (directory / "process.json").write_text(json.dumps(vars(done)))

    directory = made_once(tmp_path_factory, "cli-bundle", build)
    return subprocess.CompletedProcess(**json.loads((directory / "process.json").read_text()))


@pytest.fixture(scope="session")
def bundle(built: subprocess.CompletedProcess[str]) -> Path:
    """The tiny BERT's bundle, of 100 positions. Not to be changed: copy it."""
    assert built.returncode == 0, built.stderr
    return Path(built.args[-1])
