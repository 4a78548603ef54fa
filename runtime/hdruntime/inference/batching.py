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
    padding_key: Callable[[int], int] | None = None,
    max_padding: Callable[[int], int] | None = None,
    max_rows: Callable[[int], int] | None = None,
    full_tokens: int | None = None,
) -> list[list[int]]:
    """Sort rows by length and pack them into batches of at most `batch_tokens` tokens, padding included.

    The longest rows come first, so that a lack of memory shows early. Rows of equal length keep their order.

    Args:
        lengths: tokens of each row, 1 or more.
        batch_tokens: maximum of a batch's rows times its longest row. A longer row is a batch of its own.
        padding_key: tokens of a row -> key that all rows of a batch share, monotonic in the tokens; None if rows of any
            length may share a batch.
        max_padding: tokens of a batch's longest row -> maximum tokens of padding in the batch; None for any number.
        max_rows: tokens of a batch's longest row -> maximum rows of the batch; None for any number.
        full_tokens: number of tokens from which a batch is full for rows that are a sixteenth shorter than its longest
            row; None for no such limit.

    Returns:
        the batches, each a list of indices into `lengths`.
    """
    if batch_tokens < 1:
        raise InputError(parameter="batch_tokens", value=batch_tokens, accepted="1 or more, for example 16384")
    batches: list[list[int]] = []
    longest, row_limit, padding_left, batch_key = 0, 0, 0, None
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        key = None if padding_key is None else padding_key(lengths[row])
        if (
            not batches
            or len(batches[-1]) == row_limit
            or key != batch_key
            or longest - lengths[row] > padding_left
            or (
                full_tokens is not None
                and len(batches[-1]) * longest >= full_tokens
                and 16 * (longest - lengths[row]) >= longest
            )
        ):
            batches.append([])
            longest, batch_key = lengths[row], key
            row_limit = max(1, batch_tokens // longest)
            if max_rows is not None:
                row_limit = min(row_limit, max_rows(longest))
            padding_left = sys.maxsize if max_padding is None else max_padding(longest)
        padding_left -= longest - lengths[row]
        batches[-1].append(row)
    return batches


def grouped(sizes: Sequence[int], *, max_items: int, max_total: int) -> Iterator[slice]:
    """Groups of consecutive items: at most `max_items` with a total size of `max_total`, or one larger item."""
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == max_items or total + size > max_total):
            yield slice(first, index)
            first, total = index, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def tokens_with_room(manifest: Manifest, *, free_bytes: int | None) -> int:
    """The default of the maximum tokens per batch on a CPU: an estimate of the tokens that fit in half the free memory.

    On a CPU a lack of memory is no error: the kernel kills the process. The other half is for texts, outputs and a
    batch of another thread.

    Args:
        manifest: manifest of the bundle.
        free_bytes: free memory after the bundle was loaded; None if unknown.
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
    """Maximum tokens per batch by the length of its rows. Safe to use from several threads.

    Attributes:
        batch_tokens: default of the maximum tokens per batch.
        longest_row: tokens of the longest row that ever ran; 0 before the first.
    """

    def __init__(self, batch_tokens: int = sys.maxsize) -> None:
        self.batch_tokens, self.longest_row = batch_tokens, 0
        self._tokens: dict[int, int] = {}
        self._lock = threading.Lock()

    def max_rows(self, tokens: int) -> int:
        """Maximum rows of a batch whose longest row has a number of tokens: at least one."""
        limit = self._tokens.get(_bucket(tokens))
        return sys.maxsize if limit is None else max(1, limit // tokens)

    def halve(self, rows: int, tokens: int) -> None:
        """Record that a batch of this shape did not fit; warn the first time."""
        limit = rows // 2 * tokens
        with self._lock:
            if not self._tokens:
                logger.warning(_WARNING, rows, tokens, limit, limit)
            self._tokens[_bucket(tokens)] = min(limit, self._tokens.get(_bucket(tokens), limit))

    def note_success(self, tokens: int) -> None:
        """Record that a row of this length ran."""
        if tokens > self.longest_row:
            with self._lock:
                self.longest_row = max(tokens, self.longest_row)


def _bucket(tokens: int) -> int:
    """The next power of two: rows of similar lengths share a limit."""
    return 1 << (tokens - 1).bit_length()
