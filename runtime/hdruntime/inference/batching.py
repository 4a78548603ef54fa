"""Maximum tokens of a batch, by the free memory and by the batches that did not fit."""

from __future__ import annotations

import logging
import math
import sys
import threading

from hdruntime.bundle.manifest import Manifest

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
