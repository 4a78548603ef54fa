"""Limits that a session learns from batches that did not fit in memory."""

from __future__ import annotations

__all__ = ["MemoryLimits"]

import logging
import sys
import threading

logger = logging.getLogger(__name__)

_WARNING = (
    "Out of memory with a batch of %d x %d tokens: continuing with at most %d tokens per batch of such rows. "
    "To start with that limit: --batch-tokens %d, in Python batch_tokens."
)


class MemoryLimits:
    """Most tokens of a batch, by the length of its rows. Safe to use from several threads.

    Attributes:
        longest_row: tokens of the longest row that ever ran; 0 before the first.
    """

    def __init__(self) -> None:
        self.longest_row = 0
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
