"""The work of local attention with sides: queries with the tokens around them, and with the sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries and keys, of tokens and of sides, that see each other in one text without padding, in all its heads.

    Args:
        decisive: the attributes of a node.
        tokens: of the text.
        heads: of the attention.
    """
    radius, side_tokens = decisive["radius"], decisive["side_tokens"]
    places = np.arange(tokens)
    first, last = np.maximum(places - radius, 0), np.minimum(places + radius, tokens - 1)
    sides = tokens * (tokens // side_tokens) if side_tokens else 0
    return heads * (int((last - first + 1).sum()) + sides)
