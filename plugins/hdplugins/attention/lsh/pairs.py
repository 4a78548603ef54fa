"""The work of LSH attention: scores of queries with the keys of the chunks that they see in each round."""

from __future__ import annotations

__all__ = ["pairs"]

from collections.abc import Sequence

import numpy as np

from hdplugins.attention.chunks.neighbours import padded_tokens
from hdplugins.attention.chunks.pairs import seen_keys


def pairs(
    *,
    tokens: int,
    heads: int,
    global_tokens: int = 0,
    chunk: int,
    before: int,
    after: int,
    buckets: Sequence[int],
    rounds: int,
    multiple: int,
    causal: int,
    ends_by_row: int | None = None,
    scale: float | None = None,
) -> int:
    """Scores of one text without padding, in all its heads: of a query, in each round, with the keys of its chunks.

    Linear in tokens to compute. Which tokens meet is up to their hashes, how many scores there are is not: chunks are
    full but for the last real one of a round. A chunk that is seen several times counts once. Some of these scores are
    of keys that are hidden: a query's own in each round, and again where a chunk sees another round's; and, with
    `causal`, about half. Hashes and the sort, a few products of a token, do not count.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused: there are none.
        chunk: attribute of the operator, as are those below; see `reference`.
        before: likewise.
        after: likewise.
        buckets: unused.
        rounds: attribute of the operator.
        multiple: likewise.
        causal: unused.
        ends_by_row: unused: nothing is padding.
        scale: unused.
    """
    of_round = np.clip(tokens - chunk * np.arange(padded_tokens(tokens, multiple) // chunk), 0, chunk)
    sizes = np.tile(of_round, rounds)
    return heads * int((sizes * seen_keys(sizes, before, after)).sum())
