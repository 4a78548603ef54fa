"""Commands in processes of their own that need not import anything, for they are forks of the tests'."""

from __future__ import annotations

__all__ = ["Fork"]

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


class Fork:
    """A fork of this process that calls a function, and whose exit code is what that returns.

    For what a new process would spend its time importing, PyTorch above all, while the claim is about something else:
    that it is killed, that its disk is full, that its stderr is a terminal.

    Args:
        call: what it does.
        output: what it prints goes to ``output.out`` and ``output.err``, beside one another.
        terminal: a descriptor that takes the place of ``output.err``.
    """

    def __init__(self, call: Callable[[], int], output: Path, *, terminal: int | None = None) -> None:
        self._stdout, self._stderr = output.with_suffix(".out"), output.with_suffix(".err")
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(call, terminal))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, minus the signal that killed it; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()

    def finished(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; what it printed."""
        self._process.join(timeout=600)
        stderr = self._stderr.read_text() if self._stderr.exists() else ""
        code = self._process.exitcode
        assert code is not None, stderr
        return subprocess.CompletedProcess([], code, self._stdout.read_text(), stderr)

    def _run(self, call: Callable[[], int], terminal: int | None) -> None:
        with self._stdout.open("wb") as out:
            os.dup2(out.fileno(), 1)
        if terminal is None:
            with self._stderr.open("wb") as err:
                os.dup2(err.fileno(), 2)
        else:
            os.dup2(terminal, 2)
            os.close(terminal)
        # Not pytest's any more.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.getLogger().handlers.clear()
        # The threads of the parent's tokenizers are not here, which their library would say on stderr.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        sys.exit(call())
