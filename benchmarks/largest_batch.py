"""The largest batch of each length that fits a memory budget, found by running batches.

Usage: python -m benchmarks.largest_batch BUNDLE --memory 24GB [--lengths 512,4096] [--baselines torch,onnx-plain]

The memory is GPU memory of a series on a GPU, else resident memory of the process. Up to 40 sequences the result is
exact, above that within 5 %.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.baselines import BASELINES
from benchmarks.command import exit_with
from hdexport.bench.baselines.baseline import CaseSpec
from hdexport.bench.measure.processes import run_function
from hdexport.bench.results.result import RunStatus
from hdexport.bench.run.plan import BenchOptions, PlannedSeries, parse_lengths, plan
from hdexport.bench.run.preparation import inputs_path, write_inputs
from hdexport.bench.run.worker import measured
from hdruntime.errors import InputError

logger = logging.getLogger(__name__)

MOST_TEXTS = 4096
"""The largest batch that is tried."""

_RESOLUTION = 20
"""If a batch of n fits and one of n + n/20 does not, n is the answer: exact below 40, within 5 % above."""

_FASTEST_GROWTH = 8
"""A batch that is tried is at most this many times the largest that fitted: a prediction from two texts is a guess."""

_SEARCH_LIMITS = 3
"""A search starts no process after this many time limits of one process."""

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

_AMOUNT = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


class Probe(NamedTuple):
    """How one tried batch ended, the memory that it took, or why there is no figure."""

    status: RunStatus
    peak_bytes: int | None = None
    reason: str | None = None


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        batch: largest batch that was seen to fit; 0 if a single sequence does not fit.
        peak_bytes: memory of that batch; None if `batch` is 0.
        is_limit: whether the next larger batch (from 40 on, a batch at most 5 % larger) was seen not to fit.
        reason: what ended the search: a batch that did not fit, a time limit, a failure.
    """

    batch: int
    peak_bytes: int | None
    is_limit: bool
    reason: str


def bytes_from(text: str) -> int:
    """An amount of memory in bytes, as users type it: ``24GB``, ``512 MB``, ``8GiB`` or ``24e9``."""
    match = _AMOUNT.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    amount = float(match[1]) * factor if match and factor else math.nan
    if not 1 <= amount < math.inf:
        raise InputError(
            f"{text!r} is not an amount of memory.\n"
            "Write 24GB or 512MB (powers of 1000), 8GiB or 512MiB (powers of 1024), or bytes like 24e9."
        )
    return int(amount)


def probe_case(spec: CaseSpec, *, budget_bytes: int, time_limit_s: float) -> Probe:
    """Memory of one call of a case. On a CPU its process is killed as soon as it exceeds the budget."""
    limit = budget_bytes if spec.device == "cpu" else None
    outcome, figures = run_function(
        functools.partial(measured, spec), time_limit_s=time_limit_s, memory_limit_bytes=limit
    )
    if figures is None:
        return Probe(status=outcome.status, reason=outcome.reason)
    peak_bytes = figures.memory.rss_bytes if spec.device == "cpu" else figures.memory.vram_bytes
    if peak_bytes is None:
        return Probe(status=RunStatus.FAILED, reason="This machine does not report how much memory a process takes.")
    return Probe(status=RunStatus.OK, peak_bytes=peak_bytes)


def largest_batch(
    probe: Callable[[int], Probe],
    *,
    budget_bytes: int,
    time_limit_s: float = math.inf,
    most_texts: int = MOST_TEXTS,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The largest batch that was seen to fit; it is the limit if the next larger one does not fit, or, from 40 texts
    on, one that is at most 5 % larger. No try begins after the time limit.

    Memory is nearly linear in the batch: after 1 and 2 the next try is where the budget would be reached, and later
    tries close in on that.
    """
    fitted: list[tuple[int, int]] = []
    too_large: int | None = None
    narrowed = 0  # tries since one did not fit
    reason = f"{most_texts} is the largest batch that is tried."
    deadline = clock() + time_limit_s

    def found(reason: str, *, is_limit: bool = False) -> Found:
        batch, peak_bytes = fitted[-1] if fitted else (0, None)
        return Found(batch, peak_bytes, is_limit, reason)

    while True:
        batch = _next_batch(fitted, too_large, budget_bytes, most_texts, halves=narrowed % 2 == 1)
        if batch is None:
            return found(reason, is_limit=too_large is not None)
        if clock() >= deadline:
            return found(f"The search ended at its time limit, {time_limit_s:g} s.")
        tried = probe(batch)
        logger.info("batch %d: %s, %s bytes", batch, tried.status.value, tried.peak_bytes)
        if tried.status in (RunStatus.FAILED, RunStatus.TIMEOUT):
            return found(f"A batch of {batch} ended the search ({tried.status.value}): {tried.reason}")
        narrowed += too_large is not None
        if tried.peak_bytes is None:
            too_large, reason = batch, f"A batch of {batch} does not fit: {tried.reason}"
        elif tried.peak_bytes > budget_bytes:
            too_large, reason = batch, f"A batch of {batch} takes {tried.peak_bytes / 1e9:.3g} GB."
        else:
            fitted.append((batch, tried.peak_bytes))


def _next_batch(
    fitted: Sequence[tuple[int, int]], too_large: int | None, budget_bytes: int, most_texts: int, *, halves: bool
) -> int | None:
    """The batch to try, always larger than the largest that fitted; None if nothing is left."""
    largest = fitted[-1][0] if fitted else 0
    least = largest + max(1, largest // _RESOLUTION)
    if largest >= most_texts or (too_large is not None and least >= too_large):
        return None
    most = min(most_texts, largest * _FASTEST_GROWTH)
    if too_large is not None:
        most = too_large - max(1, too_large // _RESOLUTION)
        # The prediction closes in at once if memory is linear; every other try halves, however memory grows.
        if halves or least > most:
            return (largest + too_large) // 2
    if len(fitted) < 2:
        return largest + 1 if too_large is None else least
    (less, less_bytes), (more, more_bytes) = fitted[0], fitted[-1]
    if more_bytes <= less_bytes:
        return most
    # The batch at which a line through the smallest and the largest that fitted reaches the budget.
    predicted = more + (budget_bytes - more_bytes) * (more - less) // (more_bytes - less_bytes)
    return min(max(predicted, least), most)


def main() -> int:
    """Search, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--memory", required=True, help="budget, like 24GB")
    parser.add_argument("--lengths", type=parse_lengths)
    parser.add_argument("--baselines", default="", help=f"beside the bundle: {', '.join(BASELINES)}")
    parser.add_argument("--model", help="checkpoint of the bundle")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of one process")
    parser.add_argument("--max-batch", type=int, default=MOST_TEXTS)
    options = parser.parse_args()
    budget_bytes = bytes_from(options.memory)
    planned = plan(
        BenchOptions(
            bundles=(options.bundle,),
            lengths=options.lengths,
            baselines=tuple(BASELINES[name] for name in filter(None, options.baselines.split(","))),
            model=options.model,
            device=options.device,
        )
    )
    table = Table(
        "tokens", "series", "batch", "peak", "stopped by", title=f"largest batch in {options.memory}", box=None
    )
    with tempfile.TemporaryDirectory() as scratch:
        for series in (each for each in planned.series if each.is_available):
            artefact = None
            if series.baseline is not None:
                artefact = series.baseline.prepare(series.model, Path(scratch), device=series.device).artefact
            for tokens in planned.lengths:
                probe = functools.partial(
                    _probe, series, artefact, Path(scratch), tokens, threads=planned.threads,
                    budget_bytes=budget_bytes, time_limit_s=options.time_limit,
                )  # fmt: skip
                found = largest_batch(
                    probe,
                    budget_bytes=budget_bytes,
                    time_limit_s=_SEARCH_LIMITS * options.time_limit,
                    most_texts=options.max_batch,
                )
                peak = "" if found.peak_bytes is None else f"{found.peak_bytes / 1e9:.3g} GB"
                batch = f"{found.batch}{'' if found.is_limit else ' or more'}"
                table.add_row(str(tokens), Text(series.series.name), batch, peak, Text(found.reason))
    Console().print(table)
    return 0


def _probe(
    series: PlannedSeries,
    artefact: Path | None,
    folder: Path,
    tokens: int,
    batch: int,
    *,
    threads: int,
    budget_bytes: int,
    time_limit_s: float,
) -> Probe:
    inputs = inputs_path(folder, batch, tokens)
    if not inputs.exists():
        write_inputs(series.model, folder, [(batch, tokens)])
    spec = CaseSpec(
        bundle=series.bundle.path,
        inputs=inputs,
        backend="" if series.baseline else series.series.runner,
        baseline=series.baseline,
        artefact=artefact,
        device=series.device,
        precision=series.precision,
        threads=threads,
    )
    return probe_case(spec, budget_bytes=budget_bytes, time_limit_s=time_limit_s)


if __name__ == "__main__":
    exit_with(main)
