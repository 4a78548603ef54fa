"""The work of attention by clipped distance: every query with every key."""

from __future__ import annotations

__all__ = ["pairs"]


def pairs(*, tokens: int, heads: int, global_tokens: int = 0, reach: int, scale: float | None = None) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused.
        reach: unused: distances beyond it are seen, too.
        scale: unused.
    """
    return heads * tokens * tokens
