"""Progress of a long command on the terminal."""

from __future__ import annotations

__all__ = ["StatusLine", "TerminalProgress"]

import sys
import time
from types import TracebackType

from hdexport.support.progress import Progress


class StatusLine:
    """One line at the end of stderr that says what is going on and for how long; nothing where that is no terminal.

    A context manager: the line is gone when the block ends.

    Args:
        hidden: show nothing on a terminal either.
    """

    def __init__(self, *, hidden: bool = False) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=hidden or not sys.stderr.isatty(),
            transient=True,
            # What is printed on the same terminal has to go above the line; what goes to a file or a pipe has not.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._line.add_task("", total=None)

    def __enter__(self) -> StatusLine:
        self._line.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._line.stop()

    def begin(self, text: str) -> None:
        """Show a text, its time from zero."""
        self._line.reset(self._task, description=text, total=None)

    def show(self, text: str) -> None:
        """Show another text; the time goes on."""
        self._line.update(self._task, description=text)

    def leave(self, text: str) -> None:
        """Leave a line above, for good."""
        if not self._line.disable:
            self._line.console.print(text, markup=False, highlight=False, soft_wrap=True)


class TerminalProgress(Progress):
    """Steps with their elapsed time on stderr, results on stdout; without a terminal only the results.

    A context manager: the last step ends with the block.
    """

    def __init__(self) -> None:
        self._line = StatusLine()
        self._title = ""
        self._began = time.perf_counter()

    def __enter__(self) -> TerminalProgress:
        self._line.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finish_step("failed" if error else "done")
        self._line.__exit__(kind, error, traceback)

    def step(self, title: str) -> None:
        self._finish_step("done")
        self._title, self._began = title, time.perf_counter()
        self._line.begin(title)

    def detail(self, text: str, done: int, total: int) -> None:
        self._line.show(f"{self._title}: {text} {done}/{total}")

    def result(self, line: str) -> None:
        # flush, so that a reader of a pipe sees a check when it is made.
        print(line, flush=True)

    def _finish_step(self, outcome: str) -> None:
        if self._title:
            self._line.leave(f"{self._title}: {outcome}, {time.perf_counter() - self._began:.1f} s")
        self._title = ""
