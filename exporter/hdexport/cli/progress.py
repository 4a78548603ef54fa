"""Progress of a long command on the terminal."""

from __future__ import annotations

__all__ = ["TerminalProgress"]

import sys
import time
from types import TracebackType

from hdexport.progress import Progress


class TerminalProgress(Progress):
    """Steps with their elapsed time on stderr, results on stdout; without a terminal only the results.

    A context manager: the last step ends with the block.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._shown = sys.stderr.isatty()
        self._title = ""
        self._began = time.perf_counter()
        self._status = self._console.status("") if self._shown else None

    def __enter__(self) -> TerminalProgress:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finish_step("failed" if error else "done")
        if self._status:
            self._status.stop()

    def step(self, title: str) -> None:
        self._finish_step("done")
        self._title, self._began = title, time.perf_counter()
        if self._status:
            self._status.update(title)

    def detail(self, text: str, done: int, total: int) -> None:
        if self._status:
            self._status.update(f"{self._title}: {text} {done}/{total}")

    def result(self, line: str) -> None:
        # flush, so that a reader of a pipe sees a check when it is made.
        print(line, flush=True)

    def _finish_step(self, outcome: str) -> None:
        if self._title and self._status:
            elapsed = time.perf_counter() - self._began
            self._console.print(f"{self._title}: {outcome}, {elapsed:.1f} s", highlight=False)
        self._title = ""
