"""Commands in processes of their own that need not import anything, for they are forks of one that has."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection

from hdexport.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "hdexport.cli.build",
        "hdexport.cli.extend",
        "hdexport.cli.run",
        "hdexport.build",
        "hdexport.extend",
        "hdexport.verify",
        "transformers.models.bert.modeling_bert",
        "onnxruntime",
        "pandas",
        "rich.progress",
    ]
)


class Fork:
    """A process that calls a function, and whose exit code is the function's result.

    For claims about a process and not its imports, PyTorch's above all, which take a new process its time:
    that it is killed, that its disk is full, that its stderr is a terminal. A process that does nothing else forks it:
    a fork of the tests' own would wait for threads of Arrow or Ray that it does not have.

    Args:
        call: a function of a module that can be imported.
        arguments: of the function.
        terminal: a descriptor that is to be its stderr.
    """

    def __init__(self, call: Callable[..., int], *arguments: object, terminal: int | None = None) -> None:
        # Ours from here on, for nothing removes them: they end with this object.
        self._stdout, self._stderr = tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()  # noqa: SIM115
        stderr = self._stderr.name if terminal is None else os.ttyname(terminal)
        begins, child_begins = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run,
            args=(call, arguments, self._stdout.name, stderr, dict(os.environ), child_begins),
            daemon=True,
        )
        self._process.start()
        child_begins.close()
        # The child has opened the terminal, which may be closed here.
        begins.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The process' exit code, minus the signal that killed it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()

    def errors(self) -> str:
        """The process' stderr so far."""
        return os.pread(self._stderr.fileno(), 2**20, 0).decode()

    def finished(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Wait for its end; its stderr.

        Args:
            timeout: in seconds, after which this fails.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"it did not end: {self.errors()}"
        printed = os.pread(self._stdout.fileno(), 2**20, 0).decode()
        return subprocess.CompletedProcess([], code, printed, self.errors())


def run_command(arguments: list[str], ignored: Collection[signal.Signals] = ()) -> int:
    """The command line, which finds signals as a terminal leaves them, but for those that are ignored."""
    for number, handler in {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }.items():
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    sys.argv = ["hdexport", *arguments]
    return main(arguments)


def _run(
    call: Callable[..., int],
    arguments: tuple[object, ...],
    stdout: str,
    stderr: str,
    environment: Mapping[str, str],
    begins: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, stdout), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    begins.send(None)
    sys.exit(call(*arguments))
