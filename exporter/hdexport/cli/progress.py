"""Progress of a long command on the terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console, RenderableType
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from hdexport.cli.flags import flag
from hdexport.cli.verification_table import outcome_line, print_verification
from hdexport.support.progress import Progress
from hdruntime.bundle.verification import Skip, Status, VerificationRecord
from hdruntime.errors import Message, write

if TYPE_CHECKING:
    from hdexport.support.check import Check
    from hdruntime.bundle.manifest import Fp16Overflow

logger = logging.getLogger(__name__)


def duration_text(seconds: float) -> str:
    """``0:00:07``, ``1:02:30``."""
    return str(timedelta(seconds=round(seconds)))


class StatusLine(rich.progress.Progress):
    """One line at the end of stderr that says the present step and its duration; nothing where stderr is no terminal.

    What `below` returns is shown below the line, as far as there is room.
    """

    def __init__(self, *, hidden: bool = False, below: Callable[[], RenderableType | None] = lambda: None) -> None:
        self._below = below
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            _ToGo(),
            console=Console(stderr=True, highlight=False),
            disable=hidden or not sys.stderr.isatty(),
            transient=True,
            # Lines that are printed on the same terminal have to go above this line.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self.add_task("", total=None)

    def stop(self) -> None:
        """Remove the line. One that is not shown has nothing to remove, and rich before 14.3 prints an empty line."""
        if not self.disable:
            super().stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """The parts of the line."""
        yield from super().get_renderables()
        if (below := self._below()) is not None:
            yield below

    def begin(self, text: str, *, total: float | None = None) -> None:
        """Show a text and its time from zero; with a total, once some of it is done, also the time to go."""
        self.reset(self._task, description=text, total=total)

    def show(self, text: str) -> None:
        """Show another text; the time continues."""
        self.update(self._task, description=text)

    def did(self, amount: float, *, left_out: float = 0) -> None:
        """Add to the amount done of the total, and take the amount left out off the total."""
        (task,) = self.tasks
        self.update(self._task, advance=amount, total=(task.total or 0) - left_out)

    def leave(self, text: str) -> None:
        """Print a line above that stays."""
        if not self.disable:
            self.console.print(text, markup=False, soft_wrap=True)


class _ToGo(rich.progress.ProgressColumn):
    """Estimated from all the time taken: rich's own column forgets times of more than half a minute ago."""

    def render(self, task: rich.progress.Task) -> Text:
        if not (task.completed and task.total and task.elapsed):
            return Text()
        return Text(f"about {duration_text(task.elapsed * (task.total / task.completed - 1))} to go")


class TerminalProgress(Progress):
    """The current step with its elapsed time on a terminal, results on stdout, durations of steps in the log.

    Attributes:
        listed: statuses of the checks that are printed one by one.
        shows_table: whether the table of a verification is printed.
    """

    def __init__(self, *, listed: Collection[Status] = (Status.FAIL,), shows_table: bool = True) -> None:
        self.listed, self.shows_table = listed, shows_table
        self._line = StatusLine()
        self._title = ""
        self._began = time.perf_counter()

    def __enter__(self) -> TerminalProgress:
        self._line.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._finish_step()
        self._line.stop()

    def step(self, title: str) -> None:
        self._finish_step()
        self._title, self._began = title, time.perf_counter()
        self._line.begin(title)

    def detail(self, text: str, done: int, total: int) -> None:
        self._line.show(f"{self._title}: {text} {done}/{total}")

    def result(self, message: Message) -> None:
        # flush, so that a reader of a pipe sees a check when it is made.
        print(write(message, flag), flush=True)

    def check(self, outcome: Check | Skip) -> None:
        if outcome.status in self.listed:
            self.result(outcome_line(outcome))

    def verified(self, record: VerificationRecord, fp16_overflow: Fp16Overflow | None) -> None:
        if self.shows_table:
            print_verification(record, fp16_overflow)

    def _finish_step(self) -> None:
        if self._title:
            logger.info("%s: %.1f s", self._title, time.perf_counter() - self._began)
        self._title = ""
