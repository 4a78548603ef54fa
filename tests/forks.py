"""Commands in processes of their own that need not import anything, for they are forks of the tests'."""

from __future__ import annotations

__all__ = ["Fork"]

import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable


class Fork:
    """A fork of this process that calls a function, and whose exit code is what that returns.

    For what a new process would spend its time importing, PyTorch above all, while the claim is about something else:
    that it is killed, that its disk is full, that its stderr is a terminal.

    Args:
        call: what it does.
        terminal: a descriptor that is to be its stderr.
    """

    def __init__(self, call: Callable[[], int], *, terminal: int | None = None) -> None:
        # Ours from here on, for nothing removes them: they end with this object.
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._run, args=(call, terminal), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, minus the signal that killed it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()

    def errors(self) -> str:
        """What it has written to stderr so far."""
        # Not read(): where we are in the file is where the fork writes next.
        return os.pread(self._stderr.fileno(), 2**20, 0).decode()

    def finished(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Wait for its end; what it printed.

        Args:
            timeout: in seconds, after which this fails.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"it did not end: {self.errors()}"
        printed = os.pread(self._stdout.fileno(), 2**20, 0).decode()
        return subprocess.CompletedProcess([], code, printed, self.errors())

    def _run(self, call: Callable[[], int], terminal: int | None) -> None:
        os.dup2(self._stdout.fileno(), 1)
        os.dup2(self._stderr.fileno() if terminal is None else terminal, 2)
        if terminal is not None:
            os.close(terminal)
        # Not pytest's any more.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.getLogger().handlers.clear()
        # The threads of the parent's tokenizers are not here, which their library would say on stderr.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        sys.exit(call())
