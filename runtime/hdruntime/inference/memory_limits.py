"""What a session learns from batches that got no memory."""

from __future__ import annotations

__all__ = ["MemoryLimits"]

import logging
import sys
import threading

logger = logging.getLogger(__name__)

_WARNING = (
    "Out of memory with a batch of %d x %d tokens: going on with at most %d tokens a batch of such rows. "
    "To start with that: --batch-tokens %d, in Python batch_tokens."
)


class MemoryLimits:
    """Tokens that a batch may have, by the length of its rows. Safe to use from several threads.

    Attributes:
        longest_row: tokens of the longest row that ever ran; 0 for none.
    """

    def __init__(self) -> None:
        self.longest_row = 0
        self._tokens: dict[int, int] = {}
        self._lock = threading.Lock()

    def most_rows(self, tokens: int) -> int:
        """Rows that a batch may have whose longest has so many tokens: at least one."""
        limit = self._tokens.get(_bucket(tokens))
        return sys.maxsize if limit is None else max(1, limit // tokens)

    def halve(self, rows: int, tokens: int) -> None:
        """Remember that a batch of so many rows got no memory; warn if it is the first."""
        limit = rows // 2 * tokens
        with self._lock:
            if not self._tokens:
                logger.warning(_WARNING, rows, tokens, limit, limit)
            self._tokens[_bucket(tokens)] = min(limit, self._tokens.get(_bucket(tokens), limit))

    def note_success(self, tokens: int) -> None:
        """Remember that a row of so many tokens ran."""
        if tokens > self.longest_row:
            with self._lock:
                self.longest_row = max(tokens, self.longest_row)


def _bucket(tokens: int) -> int:
    """Rows of similar lengths share what was learned: the next power of two."""
    return 1 << (tokens - 1).bit_length()
