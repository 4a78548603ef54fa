"""Sizes of batches: rows of different lengths are packed under a budget of tokens, which the free memory limits."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError

logger = logging.getLogger(__name__)

_STATES, _COPIES = 32, 2
"""The memory of a batch on a CPU, as float32 numbers per token: 32 times the hidden size, and twice the outputs.

Growth of the peak by batches of 1024 tokens, ONNX Runtime 1.31.1 and OpenVINO 2026.4.1: 13 to 14 and 15 to 31 times the
hidden size in models of 384 and 768 whose networks are four times as wide; 2.1 and 2.0 times the logits of a
vocabulary of 100,000 (two cores of an Intel Xeon, 2026-11-28)."""

_WARNING = (
    "Out of memory with a batch of %d x %d tokens: continuing with at most %d tokens per batch of such rows. "
    "Set the limit from the start: batch_tokens=%d."
)


def pack_by_tokens(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    alike: Callable[[int], int] | None = None,
    most_rows: Callable[[int], int] | None = None,
    enough_tokens: int | None = None,
) -> list[list[int]]:
    """Sort rows by length and cut them into batches of at most `batch_tokens` tokens, padding included.

    The longest come first, so that a lack of memory shows at once, not after an hour. Rows of one length keep their
    order.

    Args:
        lengths: tokens of each row, 1 or more.
        batch_tokens: most tokens of a batch: its rows times its longest row. A longer row goes alone.
        alike: tokens of a row -> a key that all rows of a batch share; lengths between two of equal key have that key
            too. None if any lengths may share a batch.
        most_rows: tokens of a batch's longest row -> most rows of that batch; None for any number.
        enough_tokens: a batch of so many tokens ends before a row that is a sixteenth shorter than its longest; None
            for a batch of any number of tokens.

    Returns:
        the batches, each a list of indices into `lengths`.
    """
    if batch_tokens < 1:
        raise InputError(f"batch_tokens is {batch_tokens}; it must be 1 or more, for example 16384.")
    batches: list[list[int]] = []
    longest, most, kind = 0, 0, None
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        kind_of_row = None if alike is None else alike(lengths[row])
        if (
            not batches
            or len(batches[-1]) == most
            or kind_of_row != kind
            or (
                enough_tokens is not None
                and len(batches[-1]) * longest >= enough_tokens
                and 16 * (longest - lengths[row]) >= longest
            )
        ):
            batches.append([])
            longest, kind = lengths[row], kind_of_row
            most = max(1, batch_tokens // longest)
            if most_rows is not None:
                most = min(most, most_rows(longest))
        batches[-1].append(row)
    return batches


def grouped(sizes: Sequence[int], *, most: int, most_in_all: int) -> Iterator[slice]:
    """Cut items into groups of at most `most` neighbours and `most_in_all` of their sizes; a larger one goes alone."""
    first = size = 0
    for place, of_item in enumerate(sizes):
        if place > first and (place - first == most or size + of_item > most_in_all):
            yield slice(first, place)
            first, size = place, 0
        size += of_item
    if sizes:
        yield slice(first, len(sizes))


def tokens_with_room(manifest: Manifest, *, free_bytes: int | None) -> int:
    """The default limit on the tokens of a batch on a CPU: by an estimate, half of the free memory holds so many.

    A CPU's memory does not fail: the kernel kills the process that takes too much. The other half is for texts and
    answers, and for another thread's batch. `free_bytes` are left once the bundle is loaded; None if that is not known.
    """
    if free_bytes is None:
        return sys.maxsize
    outputs = sum(
        math.prod(size for size in spec.shape if isinstance(size, int))
        for spec in manifest.outputs
        if spec.has_tokens_axis
    )
    return max(1, free_bytes // 2 // (4 * (_STATES * manifest.hidden_size + _COPIES * outputs)))


class MemoryLimits:
    """Most tokens of a batch, by the length of its rows. Safe to use from several threads.

    Attributes:
        batch_tokens: most tokens of a batch unless more are asked for.
        longest_row: tokens of the longest row that ever ran; 0 before the first.
    """

    def __init__(self, batch_tokens: int = sys.maxsize) -> None:
        self.batch_tokens, self.longest_row = batch_tokens, 0
        self._tokens: dict[int, int] = {}
        self._lock = threading.Lock()

    def most_rows(self, tokens: int) -> int:
        """Most rows of a batch whose longest row has this many tokens: at least one."""
        limit = self._tokens.get(_bucket(tokens))
        return sys.maxsize if limit is None else max(1, limit // tokens)

    def halve(self, rows: int, tokens: int) -> None:
        """Remember that a batch of this shape did not fit; warn the first time."""
        limit = rows // 2 * tokens
        with self._lock:
            if not self._tokens:
                logger.warning(_WARNING, rows, tokens, limit, limit)
            self._tokens[_bucket(tokens)] = min(limit, self._tokens.get(_bucket(tokens), limit))

    def note_success(self, tokens: int) -> None:
        """Remember that a row of this length ran."""
        if tokens > self.longest_row:
            with self._lock:
                self.longest_row = max(tokens, self.longest_row)


def _bucket(tokens: int) -> int:
    """The next power of two: rows of similar lengths share a limit."""
    return 1 << (tokens - 1).bit_length()
