"""The largest batch of a length that fits a memory budget, found by trying."""

from __future__ import annotations

__all__ = ["MOST_TEXTS", "Probe", "bytes_from", "find_largest_batch", "largest_batch", "probe_case"]

import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.results.result import LargestBatch, Status
from hdexport.bench.run.worker import run_case
from hdruntime.errors import InputError

logger = logging.getLogger(__name__)

MOST_TEXTS = 4096
"""The largest batch that is tried."""

_RESOLUTION = 20
"""Where a batch of n fits and one of n + n/20 does not, n is the answer: exact below 40, within 5 % above."""

_FASTEST_GROWTH = 8
"""A batch that is tried is at most so many times the largest that fitted: a prediction from two texts is a guess."""

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

_AMOUNT = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One batch that was tried.

    Attributes:
        status: how it ended.
        peak_bytes: what it took; None where it did not get to its end.
        reason: what happened where the status is not ``ok``.
    """

    status: Status
    peak_bytes: int | None = None
    reason: str | None = None


class Found(NamedTuple):
    """What a search found; the fields are those of :class:`hdexport.bench.results.result.LargestBatch`."""

    batch: int
    peak_bytes: int | None
    is_limit: bool
    reason: str


def bytes_from(text: str) -> int:
    """An amount of memory in bytes, from what a person types: ``24GB``, ``512 MB``, ``8GiB`` or ``24e9``.

    Raises:
        InputError: it is none.
    """
    match = _AMOUNT.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    amount = float(match[1]) * factor if match and factor else math.nan
    if not 1 <= amount < math.inf:
        raise InputError(
            f"{text!r} is no amount of memory.\n"
            "Write 24GB or 512MB (powers of 1000), 8GiB or 512MiB (powers of 1024), or bytes like 24e9."
        )
    return int(amount)


def find_largest_batch(
    spec_of: Callable[[int], CaseSpec],
    *,
    series: str,
    tokens: int,
    budget_bytes: int,
    probe_limit_s: float,
    time_limit_s: float,
    most_texts: int = MOST_TEXTS,
) -> LargestBatch:
    """Search the largest batch that fits, each try a process of its own with one call.

    Args:
        spec_of: batch -> its case, whose inputs are written by then; what it says of runs and comparing is not used.
        series: the name of the series, for the result.
        tokens: of each text, for the result.
        budget_bytes: of resident memory where the case runs on a CPU, of GPU memory on a GPU.
        probe_limit_s: the time limit of a process.
        time_limit_s: no further process begins after it.
        most_texts: the largest batch that is tried.
    """
    found = largest_batch(
        lambda batch: probe_case(spec_of(batch), budget_bytes=budget_bytes, time_limit_s=probe_limit_s),
        budget_bytes=budget_bytes,
        time_limit_s=time_limit_s,
        most_texts=most_texts,
    )
    return LargestBatch(series=series, tokens=tokens, budget_bytes=budget_bytes, **found._asdict())


def probe_case(spec: CaseSpec, *, budget_bytes: int, time_limit_s: float) -> Probe:
    """What one call of a case takes. On a CPU its process is ended as soon as it takes more than the budget.

    Args:
        spec: the case.
        budget_bytes: likewise.
        time_limit_s: of the process.
    """
    probe = dataclasses.replace(spec, expected=None, least_runs=1, least_seconds=0.0)
    limit = budget_bytes if spec.device == "cpu" else None
    outcome, figures = run_case(probe, time_limit_s=time_limit_s, memory_limit_bytes=limit)
    if figures is None:
        return Probe(status=outcome.status, reason=outcome.reason)
    peak_bytes = figures.memory.rss_bytes if spec.device == "cpu" else figures.memory.vram_bytes
    if peak_bytes is None:
        return Probe(status=Status.FAILED, reason="This machine does not tell how much memory a process takes.")
    return Probe(status=Status.OK, peak_bytes=peak_bytes)


def largest_batch(
    probe: Callable[[int], Probe],
    *,
    budget_bytes: int,
    time_limit_s: float = math.inf,
    most_texts: int = MOST_TEXTS,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The largest batch that was seen to fit.

    Memory is nearly linear in the batch: after 1 and 2 the next try is where the budget would be reached, and those
    after it close in on where it is. Few tries, but the answer is one of them, and so is the batch that does not fit.

    Args:
        probe: try a batch.
        budget_bytes: what a batch may take.
        time_limit_s: no further try after it.
        most_texts: the largest batch that is tried.
        clock: seconds.

    Returns:
        the batch, what it took, whether it is the limit, and what ended the search. It is the limit where the next
        larger one does not fit, or, of batches of 40 and more, one that is at most 5 % larger.
    """
    search = _Search(budget_bytes, most_texts)
    deadline = clock() + time_limit_s
    while search.next_batch is not None:
        if clock() >= deadline:
            return search.found(f"The search ended at its time limit, {time_limit_s:g} s.")
        batch = search.next_batch
        tried = probe(batch)
        logger.info("batch %d: %s, %s bytes", batch, tried.status.value, tried.peak_bytes)
        if tried.status in (Status.FAILED, Status.TIMEOUT):
            return search.found(f"A batch of {batch} ended the search ({tried.status.value}): {tried.reason}")
        search.add(batch, tried)
    return search.found(search.reason)


class _Search:
    """What is known between tries."""

    def __init__(self, budget_bytes: int, most_texts: int) -> None:
        self._budget_bytes = budget_bytes
        self._most_texts = most_texts
        self._fitted: list[tuple[int, int]] = []
        self._too_large: tuple[int, str] | None = None
        self._narrowed = 0
        """Tries since there was one that did not fit."""

    @property
    def next_batch(self) -> int | None:
        """What to try; None once there is nothing left."""
        return self._larger() if self._too_large is None else self._between(self._too_large[0])

    @property
    def reason(self) -> str:
        """What ended the search, where nothing is left to try."""
        return self._too_large[1] if self._too_large else f"{self._most_texts} is the largest batch that is tried."

    def add(self, batch: int, tried: Probe) -> None:
        """A batch was tried, and fits or does not."""
        self._narrowed += self._too_large is not None
        if tried.status is Status.OUT_OF_MEMORY:
            self._too_large = batch, f"A batch of {batch} does not fit: {tried.reason}"
            return
        assert tried.peak_bytes is not None
        if tried.peak_bytes > self._budget_bytes:
            self._too_large = batch, f"A batch of {batch} takes {tried.peak_bytes / 1e9:.3g} GB."
        else:
            self._fitted.append((batch, tried.peak_bytes))

    def found(self, reason: str) -> Found:
        """What the search ends with."""
        is_limit = self._too_large is not None and self.next_batch is None
        return Found(self._largest, self._fitted[-1][1] if self._fitted else None, is_limit, reason)

    @property
    def _largest(self) -> int:
        # Only larger ones than the largest that fitted are ever tried.
        return self._fitted[-1][0] if self._fitted else 0

    def _larger(self) -> int | None:
        """While everything fitted."""
        largest = self._largest
        if largest >= self._most_texts:
            return None
        if len(self._fitted) < 2:
            return largest + 1
        most = min(self._most_texts, largest * _FASTEST_GROWTH)
        return min(max(self._predicted(), largest + _step(largest)), most)

    def _between(self, too_large: int) -> int | None:
        """Once one did not fit."""
        largest = self._largest
        if too_large - largest <= _step(largest):
            return None
        least, most = largest + _step(largest), too_large - _step(too_large)
        # The prediction closes in at once where memory is linear; every other try halves, whatever memory is like.
        if least > most or self._narrowed % 2:
            return (largest + too_large) // 2
        return min(max(self._predicted(), least), most)

    def _predicted(self) -> int:
        """The batch at which a line through the smallest and the largest that fitted reaches the budget."""
        if len(self._fitted) < 2:
            return 0
        (less, less_bytes), (more, more_bytes) = self._fitted[0], self._fitted[-1]
        if more_bytes <= less_bytes:
            return self._most_texts
        return more + (self._budget_bytes - more_bytes) * (more - less) // (more_bytes - less_bytes)


def _step(batch: int) -> int:
    return max(1, batch // _RESOLUTION)
