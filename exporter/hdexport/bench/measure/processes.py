"""A Python process with limits of time and memory, whose end, however bad, is a result."""

from __future__ import annotations

__all__ = ["Outcome", "own_output", "run_process"]

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hdexport.bench.measure import process_guard
from hdexport.bench.measure.process_guard import descendants
from hdexport.bench.results.result import Status
from hdexport.support.memory import free_bytes, resident_bytes_of, says_out_of_memory

logger = logging.getLogger(__name__)

_MOST_OF_FREE_MEMORY = 0.9
"""What a process may take where nothing else is said: beyond it, the kernel might kill somebody else's."""

_POLL_SECONDS = 0.05
"""Between two looks at resident memory."""

_LOOK_UP_SECONDS = 0.25
"""Between two looks for processes that were started meanwhile."""

_LOOK_UP_SHARE = 100
"""Looking takes at most one part in so many of the time: it reads a file of every process of the machine."""

_KILLED_WITHIN_SECONDS = 30.0
"""A killed process that waits for a device may take a while to end."""

_STDOUT_BYTES = 16 * 2**20
"""That are kept of the end: the JSON is in the last line."""

_STDERR_BYTES = 2**16
_REASON_LINES = 3
_REASON_CHARACTERS = 500
"""Of a line."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a process ended.

    Attributes:
        status: what the process says with a ``status`` in its output, or what its end says.
        output: the JSON object of the last line that it printed; None unless it ended by itself and printed one.
        reason: what happened where the status is not ``ok``: the ``reason`` in its output, or its last words.
        peak_rss_bytes: the most resident memory of the process and those that it started together, seen every 50 ms;
            a page that several share counts for each. 0 where it was never seen, or there is no ``/proc``.
    """

    status: Status
    output: dict[str, Any] | None
    reason: str | None
    peak_rss_bytes: int


def run_process(arguments: Sequence[str], *, time_limit_s: float, memory_limit_bytes: int | None = None) -> Outcome:
    """Run Python, and wait for its end. Nothing that it started is left, also if this process is killed meanwhile.

    On Linux that holds for all processes; elsewhere only for the one that is started here, and memory has no limit.

    Args:
        arguments: what follows ``python`` on the command line.
        time_limit_s: seconds until it is killed, which is ``timeout``.
        memory_limit_bytes: resident memory, of the process and those that it starts together, above which it is
            killed, which is ``OOM``. It is never more than most of what the machine has free, which None stands for.
            A process that the kernel kills for want of memory, or that says so itself, is ``OOM`` too; any other bad
            end is ``failed``.
    """
    process = _Process(arguments)
    try:
        stopped = process.follow(time_limit_s, _ceiling_bytes(memory_limit_bytes))
    finally:
        process.end()
    if stopped is not None:
        return Outcome(status=stopped[0], output=None, reason=stopped[1], peak_rss_bytes=process.peak_rss_bytes)
    return process.outcome()


@contextlib.contextmanager
def own_output() -> Iterator[IO[str]]:
    """The standard output for us alone: what frameworks print, from C++ too, goes to the standard error meanwhile."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            os.dup2(output.fileno(), 1)


class _Process:
    """A Python process under its guard."""

    def __init__(self, arguments: Sequence[str]) -> None:
        lifeline, self._lifeline = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, str(lifeline), sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[lifeline],
                start_new_session=True,  # Ctrl-C is for us, who then end it
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self._memory = _Memory(self._guard.pid)
        self._stdout, self._stderr = _Tail(_STDOUT_BYTES), _Tail(_STDERR_BYTES)

    @property
    def peak_rss_bytes(self) -> int:
        return self._memory.peak_bytes

    def follow(self, time_limit_s: float, memory_limit_bytes: int | None) -> tuple[Status, str] | None:
        """Wait until it ends by itself, or for a reason to end it."""
        deadline = time.monotonic() + time_limit_s
        for _ in self._until_end():
            if self._memory.exceeds(memory_limit_bytes):
                assert memory_limit_bytes is not None
                return Status.OUT_OF_MEMORY, (
                    f"It was ended when it took more than the {memory_limit_bytes / 1e9:.2f} GB of memory that it may."
                )
            if time.monotonic() > deadline:
                return Status.TIMEOUT, f"It was ended at its time limit, {time_limit_s:g} s."
        return None

    def end(self) -> None:
        """Kill what runs of it still."""
        os.close(self._lifeline)
        try:
            self._guard.wait(_KILLED_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("Process %d was killed and does not end; a device may hold it.", self._guard.pid)
            self._guard.kill()
        for pipe in self._pipes():
            pipe.close()

    def outcome(self) -> Outcome:
        """Of a process that ended by itself."""
        code = self._guard.returncode
        output = _last_json(self._stdout.bytes()) if code == 0 else None
        if output is None:
            status, reason = self._bad_end(code)
            return Outcome(status=status, output=None, reason=reason, peak_rss_bytes=self.peak_rss_bytes)
        return Outcome(
            status=Status(output.get("status", Status.OK)),
            output=output,
            reason=output.get("reason"),
            peak_rss_bytes=self.peak_rss_bytes,
        )

    def _bad_end(self, code: int) -> tuple[Status, str]:
        said = _last_words(self._stderr.bytes())
        if code == -signal.SIGKILL:
            return Status.OUT_OF_MEMORY, "It was killed (SIGKILL), as the kernel does where memory runs out."
        if code == 0:
            return Status.FAILED, f"Its last line of output is no JSON object. {said}".strip()
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        status = Status.OUT_OF_MEMORY if says_out_of_memory(said) else Status.FAILED
        return status, f"It ended with {end}: {said}" if said else f"It ended with {end} and said nothing."

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        return self._guard.stdout, self._guard.stderr

    def _until_end(self) -> Iterator[None]:
        """Read what it prints; yield every now and then. The guard holds both pipes, so that they end with it."""
        with selectors.DefaultSelector() as selector:
            for pipe, tail in zip(self._pipes(), (self._stdout, self._stderr), strict=True):
                selector.register(pipe, selectors.EVENT_READ, tail)
            yield_at = 0.0
            while selector.get_map():
                for key, _ in selector.select(max(0.0, yield_at - time.monotonic())):
                    chunk = os.read(key.fd, 2**16)
                    key.data.append(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                if time.monotonic() >= yield_at:
                    yield
                    yield_at = time.monotonic() + _POLL_SECONDS


class _Memory:
    """Resident memory of all processes that a guard guards."""

    def __init__(self, guard: int) -> None:
        self.peak_bytes = 0
        self._guard = guard
        self._pids: list[int] = []
        self._look_up_at = 0.0

    def exceeds(self, limit_bytes: int | None) -> bool:
        """Look, and whether it is more than that."""
        self._look_up()
        resident = resident_bytes_of(self._pids)
        self.peak_bytes = max(self.peak_bytes, resident)
        if limit_bytes is None or resident <= limit_bytes:
            return False
        # Compilers that were forked share most of what they have: only the exact count may condemn.
        return len(self._pids) == 1 or resident_bytes_of(self._pids, shared_once=True) > limit_bytes

    def _look_up(self) -> None:
        began = time.monotonic()
        if not self._pids or began >= self._look_up_at:
            self._pids = descendants(self._guard)
            took = time.monotonic() - began
            self._look_up_at = began + max(_LOOK_UP_SECONDS, _LOOK_UP_SHARE * took)


class _Tail:
    """The end of a stream of bytes, however long it is."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept = bytearray()

    def append(self, chunk: bytes) -> None:
        self._kept += chunk
        if len(self._kept) > 2 * self._most_bytes:
            del self._kept[: -self._most_bytes]

    def bytes(self) -> bytes:
        return bytes(self._kept[-self._most_bytes :])


def _ceiling_bytes(limit_bytes: int | None) -> int | None:
    free = free_bytes()
    known = [int(_MOST_OF_FREE_MEMORY * free)] if free is not None else []
    return min(known + ([] if limit_bytes is None else [limit_bytes]), default=None)


def _last_json(printed: bytes) -> dict[str, Any] | None:
    lines = printed.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        decoded = json.loads(lines[-1])
        if isinstance(decoded, dict):
            return decoded
    return None


def _last_words(printed: bytes) -> str:
    """The last lines, of a traceback that which says what went wrong."""
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith((" ", "Traceback (most recent"))] or lines
    return "\n".join(line.strip()[:_REASON_CHARACTERS] for line in said[-_REASON_LINES:])
