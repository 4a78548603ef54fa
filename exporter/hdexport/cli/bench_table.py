"""A benchmark on the terminal: one line per case while it runs, and tables at its end."""

from __future__ import annotations

__all__ = ["BenchTable"]

import shutil
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hdexport.bench.results.result import BenchResult, CaseResult, Status
from hdexport.bench.run.watcher import Watcher
from hdexport.cli.bench_summary import SHORT_COLUMNS, case_line, cell_table, figure_cells, summary_parts
from hdexport.cli.progress import StatusLine

_PIPE_COLUMNS = 160
"""Width of the tables where stdout is not a terminal."""

Case = tuple[str, int, int]
"""Name of the series, batch, tokens."""


class BenchTable(Watcher):
    """Shows a benchmark: on a terminal a live table on stderr, elsewhere one line per finished case.

    A context manager. Results go to stdout.
    """

    def __init__(self) -> None:
        self._has_lines = not (sys.stderr.isatty() and sys.stdout.isatty())
        self._cases: dict[Case, CaseResult | None] = {}
        self._done: Counter[Case] = Counter()
        self._rounds = 1
        self._line = StatusLine(below=self._table)

    def __enter__(self) -> BenchTable:
        self._line.start()
        self._line.begin("Opening the bundles")
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def step(self, title: str) -> None:
        self._line.begin(title)

    def note(self, text: str) -> None:
        self._line.leave(text)

    def planned(self, cases: Sequence[Case], rounds: int) -> None:
        self._cases, self._done, self._rounds = dict.fromkeys(cases), Counter(), rounds
        self._line.begin("", total=rounds * sum(map(_size, cases)))

    def begin(self, series: str, batch: int, tokens: int, number: int) -> None:
        self._line.show(f"{series}, {batch} x {tokens}, round {number} of {self._rounds}")

    def finish(self, case: CaseResult) -> None:
        key = (case.series, case.batch, case.tokens)
        # The latest comes first, because rows without room are left out at the end.
        self._cases = {key: case, **{other: found for other, found in self._cases.items() if other != key}}
        self._done[key] += 1
        rounds_left = self._rounds - self._done[key]
        is_over = case.status is not Status.OK or rounds_left <= 0
        self._line.did(_size(key), left_out=rounds_left * _size(key) if is_over else 0)
        if is_over and self._has_lines:
            # flush, so that a reader of a pipe sees a case when it is done.
            print(case_line(case), flush=True)

    def summary(self, result: BenchResult) -> None:
        """End the live table, and print the results to stdout."""
        self._line.stop()
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
        console = Console(width=width, highlight=False)
        for part in summary_parts(result, width=width):
            console.print(part, soft_wrap=isinstance(part, Text))

    def _table(self) -> Table | None:
        table = cell_table(["series", "batch x tokens", "rounds", *SHORT_COLUMNS])
        for (series, batch, tokens), case in self._cases.items():
            if case is not None:
                rounds = f"{self._done[series, batch, tokens]}/{self._rounds}"
                name = Text(series, no_wrap=True, overflow="ellipsis")
                table.add_row(name, f"{batch} x {tokens}", rounds, *figure_cells(case, SHORT_COLUMNS))
        return table if table.rows else None


def _size(case: Case) -> int:
    """Tokens of the batch, to which the time of a case is assumed proportional."""
    _, batch, tokens = case
    return batch * tokens
