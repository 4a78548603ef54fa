"""The commands in this process and installed, a tiny checkpoint, and its bundle."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hdexport.cli import main
from hdexport.model.tasks import Task
from support.made_once import made_once
from support.repeated_exports import one_table_of_operators, quiet_pytorch  # noqa: F401 fixtures
from support.tiny_models import save_tiny_model

Command = Callable[..., subprocess.CompletedProcess[str]]

MAX_LEN = 100
"""Longest input of the built bundle; the checkpoint has 64 positions."""


@contextlib.contextmanager
def _as_in_a_new_process(arguments: list[str], cwd: Path | None) -> Iterator[None]:
    """The command line, the directory, and no handler of logging; all as before when the block ends."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hdexport", *arguments])
        if cwd is not None:
            patch.chdir(cwd)
        try:
            yield
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers


def _main(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = list(map(str, arguments))
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        _as_in_a_new_process(words, cwd),
    ):
        try:
            code = main(words)
        except SystemExit as end:  # argparse's, after --help and --version
            code = int(end.code or 0)
    return subprocess.CompletedProcess(["hdexport", *words], code, stdout.getvalue(), stderr.getvalue())


def _installed(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hdexport")), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )


def _run(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return _installed(*arguments, cwd=cwd, **environment) if environment else _main(*arguments, cwd=cwd)


@pytest.fixture(scope="session")
def hdexport() -> Command:
    """Run a command in this process, which saves its imports: (*arguments, cwd=None) -> as a finished process.

    Errors that it does not turn into a message are raised here. With an environment, it runs the installed command.
    """
    return _run


@pytest.fixture(scope="session")
def installed() -> Command:
    """Run the installed command: (*arguments, cwd=None, **environment) -> the finished process."""
    return _installed


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Run a command, as `hdexport` does, that must fail with exit code 1, a message that matches and no traceback."""

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
        done = _main("build", checkpoint, "--max-len", MAX_LEN, "--target", "onnx", "-o", output)
        (directory / "process.json").write_text(json.dumps(vars(done)))

    directory = made_once(tmp_path_factory, "cli-bundle", build)
    return subprocess.CompletedProcess(**json.loads((directory / "process.json").read_text()))


@pytest.fixture(scope="session")
def bundle(built: subprocess.CompletedProcess[str]) -> Path:
    """The tiny BERT's bundle, of 100 positions. Not to be changed: copy it."""
    assert built.returncode == 0, built.stderr
    return Path(built.args[-1])
