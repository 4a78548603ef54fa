"""The work of dense attention: every query with every key."""

from __future__ import annotations

__all__ = ["pairs"]


def pairs(*, tokens: int, heads: int, global_tokens: int = 0, scale: float | None = None) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused.
        scale: unused.
    """
    return heads * tokens * tokens
