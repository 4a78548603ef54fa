"""The work of relative attention: queries of the text with keys of the memory and the text."""

from __future__ import annotations

__all__ = ["pairs"]

import numpy as np

from hdplugins.attention.relative.distances import check_distances


def pairs(
    *,
    tokens: int,
    heads: int,
    global_tokens: int = 0,
    memory: int = 0,
    causal: int,
    reach: int,
    scale: float | None = None,
) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused: there are none.
        memory: tokens that are remembered.
        causal: attribute of the operator, as is the one below; see `reference`.
        reach: likewise.
        scale: unused.

    Raises:
        ValueError: an attribute is out of its range.
    """
    check_distances(causal=causal, reach=reach)
    own = memory + np.arange(tokens)
    last = own if causal else np.full(tokens, memory + tokens - 1)
    first = np.maximum(own - reach + 1, 0) if reach else np.zeros(tokens, np.int64)
    return heads * int((last - first + 1).sum())
