"""The work of relative attention: queries of the text with keys of the memory and the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads.

    Args:
        decisive: the attributes of a node, and ``memory``, the tokens that are remembered, if there are any.
        tokens: of the text.
        heads: of the attention.
    """
    reach, memory = decisive["reach"], decisive.get("memory", 0)
    own = memory + np.arange(tokens)
    last = own if decisive["causal"] else np.full(tokens, memory + tokens - 1)
    first = np.maximum(own - reach + 1, 0) if reach else np.zeros(tokens, np.int64)
    return heads * int((last - first + 1).sum())
