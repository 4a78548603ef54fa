"""The work of local attention with sides: queries with the tokens around them, and with the sides."""

from __future__ import annotations

__all__ = ["pairs"]

import numpy as np

from hdplugins.attention.local_global.sides import check_reaches


def pairs(
    *,
    tokens: int,
    heads: int,
    global_tokens: int = 0,
    radius: int,
    side_tokens: int,
    side_reach: int,
    scale: float | None = None,
) -> int:
    """Queries and keys, of tokens and of sides, that see each other in one text without padding, in all its heads.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused: there are none.
        radius: attribute of the operator, as are the three below; see `reference`.
        side_tokens: likewise.
        side_reach: likewise.
        scale: unused.

    Raises:
        ValueError: an attribute is out of its range.
    """
    check_reaches(radius=radius, side_tokens=side_tokens, side_reach=side_reach, has_sides=side_tokens > 0)
    places = np.arange(tokens)
    first, last = np.maximum(places - radius, 0), np.minimum(places + radius, tokens - 1)
    sides = tokens * (tokens // side_tokens) if side_tokens else 0
    return heads * (int((last - first + 1).sum()) + sides)
