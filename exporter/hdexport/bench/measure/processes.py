"""Run a script or a function in a Python process with limits of time and memory; a failure is a result.

``python -m hdexport.bench.measure.processes NAME FOLDER`` calls the function that is pickled in FOLDER, and writes its
result there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from hdexport.bench.measure import process_guard
from hdexport.bench.measure.process_guard import descendants
from hdexport.bench.results.result import RunStatus
from hdexport.support.memory import resident_bytes_of, says_out_of_memory
from hdruntime.errors import HdexportError, OutOfMemoryError
from hdruntime.process_limits import free_bytes

logger = logging.getLogger(__name__)

_MOST_OF_FREE_MEMORY = 0.9
"""Fraction of free memory that a process may use by default: with more, the kernel might kill another process."""

_POLL_SECONDS = 0.05
"""Interval between two readings of resident memory."""

_LOOK_UP_SECONDS = 0.25
"""Minimum interval between two searches for new processes."""

_LOOK_UP_SHARE = 100
"""Searches take at most 1/100 of the time, because each search reads a file per process of the machine."""

_KILLED_WITHIN_SECONDS = 30.0
"""A killed process that waits for a device may take a while to end."""

_STDOUT_BYTES = 16 * 2**20
"""Bytes that are read from the end: the JSON is in the last line."""

_STDERR_BYTES = 2**16
_REASON_LINES = 3
_REASON_CHARACTERS = 500
"""Maximum characters of a line."""

_CALL, _RESULT = "call.pickle", "result.pickle"

_ERROR_LINES = 2

Result = TypeVar("Result")


class ProcessOutcome(NamedTuple):
    """End of a process.

    Attributes:
        status: ``status`` in the output of the process, or else the status by its exit code.
        output: JSON object in the last line of stdout; None unless the process ended by itself and printed an object.
        reason: cause if the status is not ``ok``: ``reason`` in the output, or the last lines of stderr.
        peak_rss_bytes: peak resident memory of the process and its children together, read every 50 ms; a shared page
            counts for each process. 0 if no reading succeeded, or without ``/proc``.
    """

    status: RunStatus
    output: dict[str, Any] | None = None
    reason: str | None = None
    peak_rss_bytes: int = 0


def run_process(
    arguments: Sequence[str],
    *,
    time_limit_s: float,
    memory_limit_bytes: int | None = None,
    python: str | None = None,
) -> ProcessOutcome:
    """Run Python, and wait for its end. No process that it started survives, even if this process is killed.

    On Linux this holds for all descendants; on other systems only for the first process, and memory has no limit.

    Args:
        arguments: arguments of the interpreter.
        time_limit_s: seconds until the process is killed; its status is ``timeout``.
        memory_limit_bytes: resident memory of the process and its children together, above which they are killed; the
            status is ``OOM``. None for 90 % of the free memory, which is the maximum. A process that the kernel kills
            or that reports a lack of memory is ``OOM`` too; any other failure is ``failed``.
        python: interpreter; None for the interpreter of this process.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        with _guarded([python or sys.executable, *arguments], stdout, stderr) as guard:
            memory = _Memory(guard.pid)
            stopped = _follow(guard, memory, time_limit_s, _ceiling_bytes(memory_limit_bytes))
        output = None
        end: tuple[RunStatus, str | None] | None = stopped
        if stopped is None:
            output = _last_json(_tail(stdout, _STDOUT_BYTES)) if guard.returncode == 0 else None
            end = _bad_end(guard.returncode, _last_lines(_tail(stderr, _STDERR_BYTES))) if output is None else None
    if output is not None:
        end = RunStatus(output.get("status", RunStatus.OK)), output.get("reason")
    assert end is not None
    return ProcessOutcome(status=end[0], output=output, reason=end[1], peak_rss_bytes=memory.peak_bytes)


def run_function(
    call: Callable[[], Result], *, time_limit_s: float, memory_limit_bytes: int | None = None
) -> tuple[ProcessOutcome, Result | None]:
    """Call a module-level function, or a `functools.partial` of it, in its own process.

    The result is None unless the process ended with ``ok``.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _CALL).write_bytes(pickle.dumps(call))
        function = getattr(call, "func", call)
        command = ["-m", __name__, f"{function.__module__}:{function.__qualname__}", folder]
        outcome = run_process(command, time_limit_s=time_limit_s, memory_limit_bytes=memory_limit_bytes)
        if outcome.status is not RunStatus.OK:
            return outcome, None
        result: Result = pickle.loads((Path(folder) / _RESULT).read_bytes())
    return outcome, result


def main(arguments: Sequence[str]) -> int:
    """Make the call, and print its status as a line of JSON."""
    folder = Path(arguments[-1])
    with _own_output() as output:
        call = pickle.loads((folder / _CALL).read_bytes())
        ended: dict[str, str] = {}
        try:
            (folder / _RESULT).write_bytes(pickle.dumps(call()))
        except Exception as error:  # whatever a framework raises is a result, and does not affect other processes
            logger.warning("%s failed", arguments[0], exc_info=True)
            status = RunStatus.OUT_OF_MEMORY if _is_out_of_memory(error) else RunStatus.FAILED
            ended = {"status": status.value, "reason": _reason(error)}
        print(json.dumps(ended), file=output)
    return 0


@contextlib.contextmanager
def _own_output() -> Iterator[IO[str]]:
    """Reserve standard output for the block: output of frameworks, also from C++, goes to standard error."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            os.dup2(output.fileno(), 1)


@contextlib.contextmanager
def _guarded(command: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process under its guard; both end with the block, with all their descendants."""
    guards_end, lifeline = os.pipe()
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", process_guard.__file__, str(guards_end), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[guards_end],
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(guards_end)
    try:
        yield guard
    finally:
        os.close(lifeline)
        try:
            guard.wait(_KILLED_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("Process %d was killed and does not end; a device may hold it.", guard.pid)
            guard.kill()


def _follow(
    guard: subprocess.Popen[bytes], memory: _Memory, time_limit_s: float, memory_limit_bytes: int | None
) -> tuple[RunStatus, str] | None:
    """Wait until the process ends by itself; otherwise return why it has to be killed."""
    deadline = time.monotonic() + time_limit_s
    while True:
        if memory_limit_bytes is not None and memory.exceeds(memory_limit_bytes):
            limit = f"{memory_limit_bytes / 1e9:.2f} GB"
            return RunStatus.OUT_OF_MEMORY, f"Killed at its memory limit of {limit}."
        if time.monotonic() > deadline:
            return RunStatus.TIMEOUT, f"Killed at its time limit of {time_limit_s:g} s."
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_POLL_SECONDS)
            return None


class _Memory:
    """Resident memory of all processes under a guard."""

    def __init__(self, guard: int) -> None:
        self.peak_bytes = 0
        self._guard = guard
        self._pids: list[int] = []
        self._look_up_at = 0.0

    def exceeds(self, limit_bytes: int) -> bool:
        """Read the memory, and return whether it exceeds a limit."""
        self._look_up()
        resident = resident_bytes_of(self._pids)
        self.peak_bytes = max(self.peak_bytes, resident)
        if resident <= limit_bytes:
            return False
        # Forked compilers share most of their memory, so only the exact count may end them.
        return len(self._pids) == 1 or resident_bytes_of(self._pids, shared_once=True) > limit_bytes

    def _look_up(self) -> None:
        began = time.monotonic()
        if not self._pids or began >= self._look_up_at:
            self._pids = descendants(self._guard)
            took = time.monotonic() - began
            self._look_up_at = began + max(_LOOK_UP_SECONDS, _LOOK_UP_SHARE * took)


def _tail(file: IO[bytes], most_bytes: int) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - most_bytes))
    return file.read()


def _bad_end(code: int, last_lines: str) -> tuple[RunStatus, str]:
    if code == -signal.SIGKILL:
        return RunStatus.OUT_OF_MEMORY, "The process was killed (SIGKILL), as by the kernel when memory runs out."
    if code == 0:
        return RunStatus.FAILED, f"The last line of output is not a JSON object. {last_lines}".strip()
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    status = RunStatus.OUT_OF_MEMORY if says_out_of_memory(last_lines) else RunStatus.FAILED
    return status, f"The process ended with {end}" + (f": {last_lines}" if last_lines else " and no message.")


def _ceiling_bytes(limit_bytes: int | None) -> int | None:
    free = free_bytes()
    known = [limit_bytes, None if free is None else int(_MOST_OF_FREE_MEMORY * free)]
    return min(filter(None, known), default=None)


def _last_json(printed: bytes) -> dict[str, Any] | None:
    lines = printed.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        decoded = json.loads(lines[-1])
        if isinstance(decoded, dict):
            return decoded
    return None


def _last_lines(printed: bytes) -> str:
    """Last lines of stderr; of a traceback, the line that names the error."""
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    messages = [line for line in lines if not line.startswith((" ", "Traceback (most recent"))] or lines
    return "\n".join(line.strip()[:_REASON_CHARACTERS] for line in messages[-_REASON_LINES:])


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or its cause reports a lack of memory."""
    if error is None:
        return False
    if isinstance(error, (MemoryError, OutOfMemoryError)) or says_out_of_memory(f"{type(error).__name__}: {error}"):
        return True
    return _is_out_of_memory(error.__cause__)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, HdexportError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(line[:_REASON_CHARACTERS] for line in lines[:_ERROR_LINES])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Imported after the call, whose memory may be measured.
    from hdexport.checkpoint.temporary_directory import remove_converted

    remove_converted()
    sys.stderr.flush()
    # The result is written. Frameworks' work at the end of Python takes time, and can crash.
    os._exit(code)
