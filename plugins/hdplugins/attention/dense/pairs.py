"""The work of dense attention: every query with every key, or with every one up to itself."""

from __future__ import annotations

__all__ = ["pairs"]


def pairs(*, tokens: int, heads: int, global_tokens: int = 0, scale: float | None = None, causal: int = 0) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused.
        scale: unused.
        causal: of the node.
    """
    return heads * (tokens * (tokens + 1) // 2 if causal else tokens * tokens)
