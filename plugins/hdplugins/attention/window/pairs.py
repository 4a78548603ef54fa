"""The work of sliding-window attention: queries with the keys of their window, and with the global tokens beyond it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads; each pair counts once.

    Exact, and linear in tokens to compute. The rows of the global tokens are not the operator's: the query of a global
    token counts as any other.

    Args:
        decisive: the attributes of a node, and ``global_tokens``, if there are any: the first tokens of the text, which
            every query sees; at most ``global_bound``.
        tokens: of the text.
        heads: of the attention.

    Raises:
        ValueError: a dilation that does not fit the heads, or more global tokens than the bound or the text has.
    """
    left, right, dilation = (decisive[name] for name in ("left", "right", "dilation"))
    if len(dilation) not in (1, heads) or min(dilation) < 1:
        raise ValueError(f"The dilation {list(dilation)} does not fit {heads} heads: one value of 1 or more per head.")
    global_tokens, most = decisive.get("global_tokens", 0), min(tokens, decisive["global_bound"])
    if not 0 <= global_tokens <= most:
        raise ValueError(f"{global_tokens} global tokens: a text of {tokens} tokens may have 0 to {most} here.")
    steps = Counter(list(dilation) * (heads // len(dilation)))
    return sum(count * _pairs_of_head(tokens, global_tokens, left, right, step) for step, count in steps.items())


def _pairs_of_head(tokens: int, global_tokens: int, left: int, right: int, step: int) -> int:
    query = np.arange(tokens, dtype=np.int64)
    in_window = _keys_in_window(query, tokens, left, right, step)
    global_in_window = _keys_in_window(query, global_tokens, left, right, step)
    return int((in_window + global_tokens - global_in_window).sum())


def _keys_in_window(query: npt.NDArray[np.int64], end: int, left: int, right: int, step: int) -> npt.NDArray[np.int64]:
    """How many of the first `end` tokens are ``query + step * s`` for an s in -left..right; [tokens]."""
    first = np.maximum(-left, -(query // step))
    last = np.minimum(right, (end - 1 - query) // step)
    return np.maximum(0, last - first + 1)
