"""The work of dense attention: every query with every key, or with every one up to itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads.

    Args:
        decisive: the attributes of a node. A node without ``causal`` is not causal.
        tokens: of the text.
        heads: of the attention.
    """
    return heads * (tokens * (tokens + 1) // 2 if decisive.get("causal") else tokens * tokens)
