"""The command line, in this process and installed."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hdexport.cli import COMMANDS, main
from support.named_options import missing_options

HDEXPORT = str(Path(sys.executable).with_name("hdexport"))
Command = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[..., str]


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


def run_here(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in this process, where all that it imports is there, as if it were one.

    An error that it raises and does not turn into a message is raised here. A message names options that there are.
    """
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
    if code == 1 and words and words[0] in COMMANDS:
        assert not missing_options(
            stderr.getvalue(), command=words[0], given=[word.partition("=")[0] for word in words]
        ), stderr.getvalue()
    return subprocess.CompletedProcess(["hdexport", *words], code, stdout.getvalue(), stderr.getvalue())


def run_installed(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command, with these variables in its environment besides ours."""
    command = [HDEXPORT, *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )
