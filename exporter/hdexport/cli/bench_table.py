"""Progress and results of a benchmark on the terminal."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hdexport.bench.results.formatting import bytes_text, columns_of, error_text, ms_text, number_text, outputs_text
from hdexport.bench.results.result import BenchResult, CaseResult, CaseState, RunStatus
from hdexport.bench.results.summary import notes
from hdexport.bench.run.preparation import Watcher
from hdexport.cli.progress import StatusLine

_PIPE_COLUMNS = 160
"""Width of the table if stdout is not a terminal."""

_WIDE = 110
"""Minimum width of a terminal for all columns."""

_COLUMNS = ("p50", "p95", "ratio", "tokens/s", "memory", "max error", "outputs")
_SMALL_COLUMNS = ("p50", "ratio", "memory", "max error", "outputs")

_STYLES = {CaseState.OK: "", CaseState.WRONG: "red"}
"""Colours of rows; rows in other states are yellow."""

Case = tuple[str, int, int]
"""Name of the series, batch, tokens."""


class BenchTable(Watcher):
    """Live table on stderr of a terminal; without a terminal, one line per finished case on stdout."""

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
        # The latest case is first, because rows without space are left out at the end.
        self._cases = {key: case, **{other: row for other, row in self._cases.items() if other != key}}
        self._done[key] += 1
        rounds_left = self._rounds - self._done[key]
        is_over = case.status is not RunStatus.OK or rounds_left <= 0
        self._line.did(_size(key), left_out=rounds_left * _size(key) if is_over else 0)
        if is_over and self._has_lines:
            # Flushed, so that a reader of a pipe sees each case when it ends.
            print(case_line(case), flush=True)

    def summary(self, result: BenchResult) -> None:
        """End the live table, and print the results to stdout."""
        self._line.stop()
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
        console = Console(width=width, highlight=False)
        for part in summary_parts(result, width=width):
            console.print(part, soft_wrap=isinstance(part, Text))

    def _table(self) -> Table | None:
        table = _empty_table(["series", "batch x tokens", "rounds", "p50 ms", "tokens/s", "memory", "max error"])
        for (series, batch, tokens), case in self._cases.items():
            if case is not None:
                rounds = f"{self._done[series, batch, tokens]}/{self._rounds}"
                name = Text(series, no_wrap=True, overflow="ellipsis")
                figures = _figures(case)
                cells = [figures["p50"], *(figures[column] for column in ("tokens/s", "memory", "error"))]
                table.add_row(name, f"{batch} x {tokens}", rounds, *cells)
        return table if table.rows else None


def case_line(case: CaseResult) -> str:
    shape = f"{case.series}, {case.batch} x {case.tokens}"
    if case.latency is None:
        return f"{shape}: {case.status.value}" + (f": {case.reason}" if case.reason else "")
    figures = _figures(case)
    parts = [f"p50 {ms_text(case.latency.p50_ms)}", f"p95 {ms_text(case.latency.p95_ms)}"]
    parts += [f"{figures['tokens/s']} tokens/s", figures["memory"]]
    parts += [outputs_text(case) or (f"max error {figures['error']}" if case.error else "")]
    return f"{shape}: {', '.join(filter(None, parts))}"


def summary_parts(result: BenchResult, *, width: int) -> Iterator[RenderableType]:
    """One table per batch size, the meaning of its columns, and the notes. A small terminal shows fewer columns."""
    names = _COLUMNS if width >= _WIDE else _SMALL_COLUMNS
    for batch in result.batches:
        yield _cases_table(result, batch, names)
    if result.first_series is not None:
        yield Text(f"ratio: median latency divided by the median latency of {result.first_series} in this run")
        yield Text("max error: largest absolute difference from PyTorch in float32, with all requested changes")
    for note in notes(result):
        yield Text(": ".join(filter(None, (note.kind.value, note.series, note.text))))


def _size(case: Case) -> int:
    """Tokens of the batch; the duration of a case is assumed to be proportional to them."""
    _, batch, tokens = case
    return batch * tokens


def _figures(case: CaseResult) -> Mapping[str, str]:
    peak_bytes = case.memory.peak_bytes if case.memory else None
    return {
        "p50": number_text(case.latency.p50_ms) if case.latency else case.status.value,
        "tokens/s": "" if case.tokens_per_s is None else number_text(case.tokens_per_s),
        "memory": "" if peak_bytes is None else bytes_text(peak_bytes),
        "error": error_text(case.error),
    }


def _empty_table(columns: Sequence[str], *, title: str | None = None) -> Table:
    """An empty table; only its column ``series`` breaks lines."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="dim")
    for name in columns:
        is_text = name == "series"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _cases_table(result: BenchResult, batch: int, names: Sequence[str]) -> Table:
    columns = [columns_of(result)[name] for name in names]
    headers = [f"{column.name} {column.unit}".strip() for column in columns]
    table = _empty_table(["tokens", "series", *headers], title=f"batch {batch}")
    for tokens in result.lengths:
        every = [result.case(series.name, batch, tokens) for series in result.series]
        cases = [case for case in every if case is not None]
        for case in cases:
            shown = str(tokens) if case is cases[0] else ""
            failure = [case.status.value] if case.status is not RunStatus.OK else []
            texts = failure or [column.text(case) for column in columns]
            cells = [Text(text, style=_STYLES.get(case.state, "yellow")) for text in texts]
            table.add_row(shown, Text(case.series), *cells, end_section=case is cases[-1])
    return table
