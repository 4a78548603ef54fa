"""A benchmark on the terminal: one line per case while it runs, and tables at its end; the table of a corpus."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hdexport.bench.corpus.bench import SAMPLES, CorpusResult, CorpusSeries
from hdexport.bench.results.result import BenchResult, CaseResult, Status
from hdexport.bench.results.words import LATENCIES, bytes_text, case_state, columns_of, error_text, findings, ms_text
from hdexport.bench.run.preparation import Watcher
from hdexport.cli.progress import StatusLine

_PIPE_COLUMNS = 160
"""Width of the tables where stdout is not a terminal."""

_WIDE = 118
"""Columns of a terminal that has room for all figures."""

_SHORT_COLUMNS = ("p50", "tokens/s", "memory", "error")
"""The most important figures."""

Case = tuple[str, int, int]
"""Name of the series, batch, tokens."""


class BenchTable(Watcher):
    """Shows a benchmark: on a terminal a live table on stderr, elsewhere one line per finished case on stdout."""

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
        table = _cell_table(["series", "batch x tokens", "rounds", *_SHORT_COLUMNS])
        for (series, batch, tokens), case in self._cases.items():
            if case is not None:
                rounds = f"{self._done[series, batch, tokens]}/{self._rounds}"
                name = Text(series, no_wrap=True, overflow="ellipsis")
                table.add_row(name, f"{batch} x {tokens}", rounds, *_figure_cells(case, _SHORT_COLUMNS))
        return table if table.rows else None


def case_line(case: CaseResult) -> str:
    """A finished case in one line."""
    where = f"{case.series}, {case.batch} x {case.tokens}"
    if case.latency is None:
        return f"{where}: {case.status.value}" + (f": {case.reason}" if case.reason else "")
    figures = [f"p50 {ms_text(case.latency.p50_ms)}", f"p95 {ms_text(case.latency.p95_ms)}"]
    columns = columns_of()
    figures += [f"{columns['tokens/s'].text(case)} tokens/s", columns["memory"].text(case)]
    figures += [f"error {error_text(case.error)}" if case.error else ""]
    figures += ["WRONG ANSWER"] if case_state(case) == "wrong" else []
    return f"{where}: {', '.join(filter(None, figures))}"


def summary_parts(result: BenchResult, *, width: int) -> Iterator[RenderableType]:
    """The tables, one per batch size, the largest batches, and what did not run.

    A terminal of few columns shows the most important figures only.
    """
    wide = ("p99", "mean", "sd") if width >= _WIDE else ()
    names = ["p50", "p95", *wide, "ratio", "tokens/s", "memory", "error"]
    names += ["roofline"] if width >= _WIDE and any(case.roofline for case in result.cases) else []
    for batch in result.batches:
        yield _cases_table(result, batch, names)
    if result.first_series is not None:
        yield Text(f"ratio: of the median latencies, to {result.first_series} in this run")
    if result.largest_batches:
        yield Text()
        yield _largest_batches(result)
    yield from (Text(": ".join(filter(None, finding))) for finding in findings(result))


def _size(case: Case) -> int:
    """Tokens of the batch, to which the time of a case is assumed proportional."""
    _, batch, tokens = case
    return batch * tokens


def _figure_cells(case: CaseResult, names: Sequence[str], result: BenchResult | None = None) -> list[str]:
    """A case's cells in the columns of those figures; a case without figures says why in the first.

    Ratios are taken in the result; without one there are none.
    """
    columns = columns_of(result)
    cells = {name: columns[name].text(case) for name in names}
    if case.latency is None:
        cells["p50"] = case.status.value
    if case_state(case) == "wrong":
        cells["error"] += " wrong"
    return list(cells.values())


def _cell_table(columns: Sequence[str], *, title: str | None = None) -> Table:
    """An empty table; only its column ``series`` breaks lines."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="dim")
    for name in columns:
        is_text = name in ("series", "stopped by")
        header = f"{name} ms" if name in LATENCIES else name
        table.add_column(header, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _cases_table(result: BenchResult, batch: int, names: Sequence[str]) -> Table:
    table = _cell_table(["tokens", "series", *names], title=f"batch {batch}")
    for tokens in result.lengths:
        found = [result.case(series.name, batch, tokens) for series in result.series]
        cases = [case for case in found if case is not None]
        for case in cases:
            shown = str(tokens) if case is cases[0] else ""
            style = {"ok": "", "wrong": "red"}.get(case_state(case), "yellow")
            cells = [Text(cell, style=style) for cell in _figure_cells(case, names, result)]
            table.add_row(shown, Text(case.series), *cells, end_section=case is cases[-1])
    return table


def _largest_batches(result: BenchResult) -> Table:
    budget = bytes_text(result.largest_batches[0].budget_bytes)
    table = _cell_table(["tokens", "series", "batch", "peak", "stopped by"], title=f"largest batch within {budget}")
    for found in result.largest_batches:
        batch = f"{found.batch}" + ("" if found.is_limit else " or more")
        peak = "" if found.peak_bytes is None else bytes_text(found.peak_bytes)
        table.add_row(str(found.tokens), Text(found.series), batch, peak, Text(found.reason))
    return table


def print_corpus(result: CorpusResult) -> None:
    """Print the figures of every series, and why the others have none; figures are medians of the rounds."""
    shortest, median, longest = result.lengths
    described = SAMPLES[result.corpus][0] if result.corpus in SAMPLES else "texts"
    rounds = f"{result.rounds} rounds" if result.rounds > 1 else "one round"
    print(f"{result.corpus}: {result.texts:,} {described}; {shortest} to {longest} tokens, median {median}; {rounds}")
    print(f"{result.environment['cpu']}, {result.environment['threads']} threads")
    on_gpu = result.device == "cuda"
    if on_gpu:
        print(result.environment["gpu"])
    of_gpu = ["GPU busy", "GPU memory"] if on_gpu else []
    table = Table("", "batch", "texts/s", "tokens/s", "padding", *of_gpu, "peak memory", "largest difference", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for series in result.series:
        if series.seconds:
            table.add_row(*_corpus_cells(series, result.texts, on_gpu=on_gpu))
    console = Console()
    console = console if console.is_terminal else Console(width=_PIPE_COLUMNS)
    console.print(table)
    for series in result.series:
        if series.unavailable is not None:
            console.print(f"{series.title}: not run: {series.unavailable}", style=None, markup=False, highlight=False)
        elif series.remark is not None and series.is_default:
            console.print(f"{series.name}: {series.remark}", markup=False, highlight=False)


def _corpus_cells(series: CorpusSeries, texts: int, *, on_gpu: bool) -> list[str]:
    if series.batch_size is None:
        size = "by tokens"
    else:
        size = f"{series.batch_size}, {'its default' if series.is_default else 'its best'}"
    error = series.max_abs_error
    against = "compared with" if series.is_peer else "not compared"
    busy, vram = series.gpu_busy_share, series.gpu_peak_bytes
    of_gpu = [
        f"{statistics.median(busy):.0%}" if busy else "not known",
        f"{vram / 1e6:,.0f} MB" if vram is not None else "not known",
    ]
    return [
        series.name,
        size,
        f"{texts / series.median_seconds:,.1f}",
        f"{series.tokens / series.median_seconds:,.0f}",
        f"{series.padding:.0%}",
        *(of_gpu if on_gpu else []),
        f"{series.peak_bytes / 1e6:,.0f} MB",
        against if error is None else f"{error:.1e}",
    ]
