"""A job's progress on stderr: a line on a terminal, lines in a log, or JSON for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from hdexport.cli.process import complain
from hdexport.cli.progress import StatusLine, duration_text
from hdexport.support.memory import GpuMemory, gpu_memory
from hdruntime.errors import InputError
from hdruntime.jobs.progress import JobProgress

_LINE_SECONDS = 0.2
_JSON_SECONDS = 1.0
"""Least time between two reports, while nothing but numbers change."""

_PLAIN_SECONDS = 4.0
"""Time between two lines of a log, and before the first."""


class JobReport(ABC):
    """Shows how a job goes, in reports at least so many seconds apart while nothing but numbers change."""

    def __init__(self, *, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._has_gpu = False
        self._latest: JobProgress | None = None
        self._reported_at = 0.0

    def loaded(self, *, has_gpu: bool) -> None:
        """The bundle is loaded; its rows will run on a GPU of this machine, or elsewhere."""
        self._has_gpu = has_gpu

    def progress(self, progress: JobProgress) -> None:
        """The job has come so far."""
        is_new = self._latest is None or self._latest.state is not progress.state
        self._latest = progress
        if is_new or time.monotonic() - self._reported_at >= self._pause_seconds:
            self._report(progress)
            self._reported_at = time.monotonic()

    def done_already(self, progress: JobProgress) -> None:
        """There is nothing to do: the output is the same job's."""
        self._latest = progress

    @abstractmethod
    def ended(self, state: str, message: str | None) -> None:
        """The job is ``done``, was ``stopped``, or has ``failed``; the message of a failure is printed elsewhere."""

    @abstractmethod
    def _report(self, progress: JobProgress) -> None: ...

    def _gpu_memory(self) -> GpuMemory | None:
        return gpu_memory() if self._has_gpu else None


@contextlib.contextmanager
def job_report(choice: str) -> Iterator[JobReport]:
    """The display of progress: ``bar``, which needs a terminal, ``lines``, ``json``, ``none``, or ``auto``, a bar on a
    terminal, else lines.
    """
    is_terminal = sys.stderr.isatty()
    if choice == "bar" and not is_terminal:
        raise InputError(
            "--progress bar needs a terminal on stderr.", hint="Use --progress lines or json, or leave it out."
        )
    if choice == "json":
        yield _JsonReport()
        return
    if choice == "lines" or (choice == "auto" and not is_terminal):
        with PlainLines() as lines:
            yield _TextReport(lines)
        return
    with StatusLine(hidden=choice == "none") as line:
        yield _TextReport(line)


class PlainLines:
    """The latest text on stderr every few seconds, for log files; a thread, for a batch may take longer."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.print_until, args=(self._ended.wait,), daemon=True)

    def __enter__(self) -> PlainLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, text: str) -> None:
        """Show a text from now on."""
        self._text = text

    show = begin

    def print_until(self, ended: Callable[[float], bool]) -> None:
        """Print, with pauses before, until `ended`, which waits for so many seconds, says that there is nothing more to
        print.
        """
        while not ended(_PLAIN_SECONDS):
            complain(self._text)


class _TextReport(JobReport):
    def __init__(self, line: StatusLine | PlainLines) -> None:
        super().__init__(pause_seconds=_LINE_SECONDS)
        self._line = line
        line.begin("Loading the bundle")

    def loaded(self, *, has_gpu: bool) -> None:
        super().loaded(has_gpu=has_gpu)
        self._line.begin("Reading")

    def progress(self, progress: JobProgress) -> None:
        if progress.resumed_rows and self._latest is None:
            complain(f"Continuing after {progress.resumed_rows} rows that are done.")
        super().progress(progress)

    def done_already(self, progress: JobProgress) -> None:
        complain("This job is done already, and its output has not changed.")

    def ended(self, state: str, message: str | None) -> None:
        if message is not None and state != "failed":
            complain(message)

    def _report(self, progress: JobProgress) -> None:
        self._line.show(_text(progress, self._gpu_memory()))


class _JsonReport(JobReport):
    def __init__(self) -> None:
        super().__init__(pause_seconds=_JSON_SECONDS)

    def ended(self, state: str, message: str | None) -> None:
        values = {} if self._latest is None else _values(self._latest, self._gpu_memory())
        self._write({**values, "state": state, "message": message})

    def _report(self, progress: JobProgress) -> None:
        self._write(_values(progress, self._gpu_memory()))

    def _write(self, values: dict[str, object]) -> None:
        complain(json.dumps(values))


def _text(progress: JobProgress, memory: GpuMemory | None) -> str:
    total = "" if progress.rows_total is None else f" of {progress.rows_total}"
    parts = [f"{progress.rows}{total} rows"]
    if progress.failed_rows:
        parts.append(f"{progress.failed_rows} failed")
    parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.padded_tokens:
        parts.append(f"{progress.padding_waste:.0%} padding")
    if memory is not None:
        parts.append(f"GPU {memory.used_bytes / 1e9:.1f} of {memory.total_bytes / 1e9:.1f} GB")
    if progress.eta_seconds is not None:
        parts.append(f"{progress.bytes_read / progress.bytes_total:.0%}, {duration_text(progress.eta_seconds)} to go")
    return ", ".join(parts)


def _values(progress: JobProgress, memory: GpuMemory | None) -> dict[str, object]:
    values: dict[str, object] = {
        "state": progress.state.value,
        "rows": progress.rows,
        "rows_total": progress.rows_total,
        "resumed_rows": progress.resumed_rows,
        "failed_rows": progress.failed_rows,
        "errors": dict(progress.errors),
        "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens_per_second, 1),
        "seconds": round(progress.seconds, 3),
        "eta_seconds": None if progress.eta_seconds is None else round(progress.eta_seconds, 1),
        "bytes_read": progress.bytes_read,
        "bytes_total": progress.bytes_total,
        "padding_waste": round(progress.padding_waste, 4),
    }
    if memory is not None:
        values |= {"gpu_used_bytes": memory.used_bytes, "gpu_total_bytes": memory.total_bytes}
    return values
