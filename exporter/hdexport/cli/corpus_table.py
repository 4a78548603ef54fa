"""The table of a corpus on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hdexport.bench.corpus.bench import SAMPLES
from hdexport.bench.corpus.result import CorpusResult, CorpusSeries

_PIPE_COLUMNS = 160
"""Width of the table where stdout is not a terminal."""


def print_corpus(result: CorpusResult) -> None:
    """Print the figures of every series, and why the others have none; figures are medians of the rounds."""
    shortest, median, longest = result.lengths
    described = SAMPLES[result.corpus][0] if result.corpus in SAMPLES else f"{result.texts:,} texts"
    rounds = f"{result.rounds} rounds" if result.rounds > 1 else "one round"
    print(f"{result.corpus}: {described}; {shortest} to {longest} tokens, median {median}; {rounds}")
    print(f"{result.environment['cpu']}, {result.environment['threads']} threads")
    table = Table("", "batch", "texts/s", "tokens/s", "padding", "peak memory", "largest difference", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for series in result.series:
        if series.seconds:
            table.add_row(*_cells(series, result.texts))
    console = Console()
    console = console if console.is_terminal else Console(width=_PIPE_COLUMNS)
    console.print(table)
    for series in result.series:
        if series.unavailable is not None:
            console.print(f"{series.title}: not run: {series.unavailable}", style=None, markup=False, highlight=False)
        elif series.remark is not None and series.is_default:
            console.print(f"{series.name}: {series.remark}", markup=False, highlight=False)


def _cells(series: CorpusSeries, texts: int) -> list[str]:
    if series.batch_size is None:
        size = "by tokens"
    else:
        size = f"{series.batch_size}, {'its default' if series.is_default else 'its best'}"
    error = series.max_abs_error
    against = "compared with" if series.is_peer else "not compared"
    return [
        series.name,
        size,
        f"{texts / series.median_seconds:,.1f}",
        f"{series.tokens / series.median_seconds:,.0f}",
        f"{series.padding:.0%}",
        f"{series.peak_bytes / 1e6:,.0f} MB",
        against if error is None else f"{error:.1e}",
    ]
