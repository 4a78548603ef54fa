"""The table of a corpus on the terminal."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.corpus.bench import SAMPLES, CorpusResult, CorpusSeries

_PIPE_COLUMNS = 160
"""Width of the table if stdout is not a terminal."""


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
    against = "compared with" if series.is_baseline else "not compared"
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
