"""A benchmark on the terminal: a line a case while it runs, and tables at its end."""

from __future__ import annotations

__all__ = ["BenchTable"]

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hdexport.bench.results.result import BenchResult, CaseResult, Status
from hdexport.bench.run.watcher import Watcher
from hdexport.cli.bench_eta import Case, RemainingTime
from hdexport.cli.bench_summary import case_line, cell_table, short_columns, summary_parts
from hdexport.cli.duration import duration_text

_PIPE_COLUMNS = 160
"""Of the tables where stdout is no terminal."""

_OTHER_LINES = 4
"""Of the live table: its head, what goes on, and some free so that nothing scrolls."""


class BenchTable(Watcher):
    """Shows a benchmark: on a terminal a table on stderr that goes when it ends; without, a line a finished case.

    A context manager. Results go to stdout.
    """

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._has_lines = not (self._is_live and sys.stdout.isatty())
        self._title, self._began = "Opening the bundles", time.monotonic()
        self._cases: dict[Case, CaseResult | None] = {}
        self._done: Counter[Case] = Counter()
        self._rounds = 1
        self._current: Case | None = None
        self._remaining = RemainingTime([], 1)
        self._spinner = Spinner("dots")
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            transient=True,
            refresh_per_second=5,
            # What is printed on the same terminal has to go above the table; what goes to a file or a pipe has not.
            redirect_stdout=sys.stdout.isatty(),
        )

    def __enter__(self) -> BenchTable:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def step(self, title: str) -> None:
        self._title, self._began, self._current = title, time.monotonic(), None

    def note(self, text: str) -> None:
        if self._is_live:
            self._console.print(Text(text), soft_wrap=True)

    def planned(self, cases: Sequence[Case], rounds: int) -> None:
        self._cases, self._rounds = dict.fromkeys(cases), rounds
        self._remaining = RemainingTime(cases, rounds)

    def begin(self, series: str, batch: int, tokens: int, number: int) -> None:
        self._current, self._began = (series, batch, tokens), time.monotonic()
        self._title = f"{series}, {batch} x {tokens}, round {number} of {self._rounds}"

    def finish(self, case: CaseResult) -> None:
        key = (case.series, case.batch, case.tokens)
        self._cases[key] = case
        self._done[key] += 1
        is_over = case.status is not Status.OK or self._done[key] >= self._rounds
        self._remaining.took(key, time.monotonic() - self._began, is_over=is_over)
        if is_over and self._has_lines:
            # flush, so that a reader of a pipe sees a case when it is done.
            print(case_line(case), flush=True)

    def summary(self, result: BenchResult) -> None:
        """End the live table, and print what was found to stdout."""
        self._live.stop()
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
        console = Console(width=width, highlight=False)
        for part in summary_parts(result, width=width):
            console.print(part, soft_wrap=isinstance(part, Text))

    def _render(self) -> RenderableType:
        elapsed = time.monotonic() - self._began
        status = f"{self._title}, {duration_text(elapsed)}"
        seconds = self._remaining.seconds()
        if self._current is not None and seconds is not None:
            status += f"; about {duration_text(max(0.0, seconds - elapsed))} to go"
        self._spinner.update(text=Text(status, no_wrap=True, overflow="ellipsis"))
        return Group(self._table(), self._spinner) if self._cases else self._spinner

    def _table(self) -> Table:
        """As many lines as fit, around the case that runs."""
        cases = list(self._cases)
        room = max(1, self._console.height - _OTHER_LINES)
        here = cases.index(self._current) if self._current in self._cases else len(cases)
        first = max(0, min(here - room // 2, len(cases) - room))
        columns = short_columns()
        table = cell_table(["series", "batch x tokens", "rounds", *(column.name for column in columns)])
        for key in cases[first : first + room]:
            series, batch, tokens = key
            case = self._cases[key]
            cells = ["" if case is None else column.text(case) for column in columns]
            rounds = f"{self._done[key]}/{self._rounds}"
            # One line each, or the lines that fit would not be known.
            name = Text(series, no_wrap=True, overflow="ellipsis")
            style = "bold" if key == self._current else ""
            table.add_row(name, f"{batch} x {tokens}", rounds, *cells, style=style)
        return table
