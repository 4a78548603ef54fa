"""The work of sliding-window attention: queries with the keys of their window, and with the global tokens beyond it."""

from __future__ import annotations

__all__ = ["pairs"]

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pairs(
    *,
    tokens: int,
    heads: int,
    global_tokens: int = 0,
    left: int,
    right: int,
    dilation: Sequence[int] = (1,),
    global_bound: int | None = None,
    scale: float | None = None,
) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads; each pair counts once.

    Exact, and linear in tokens to compute. The rows of the global tokens are not the operator's: the query of a global
    token counts as any other.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: the first tokens of the text, which every query sees; at most ``global_bound``.
        left: attribute of the operator, as are those below; see `reference`.
        right: likewise.
        dilation: one value per head, or a single one for all.
        global_bound: None for any number of global tokens.
        scale: unused.

    Raises:
        ValueError: a dilation that does not fit the heads, or more global tokens than the bound or the text has.
    """
    if len(dilation) not in (1, heads) or min(dilation) < 1:
        raise ValueError(f"The dilation {list(dilation)} does not fit {heads} heads: one value of 1 or more per head.")
    most = tokens if global_bound is None else min(tokens, global_bound)
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
