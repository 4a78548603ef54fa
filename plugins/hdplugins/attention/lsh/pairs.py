"""The work of LSH attention: scores of queries with the keys of the chunks that they see in each round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hdplugins.attention.chunks.pairs import seen_keys, sizes_of_chunks


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Scores of one text without padding, in all its heads: of a query, in each round, with the keys of its chunks.

    Linear in tokens to compute. Which tokens meet is up to their hashes, how many scores there are is not: chunks are
    full but for the last real one of a round. A chunk that is seen several times counts once. Some of these scores are
    of keys that are hidden: a query's own in each round, and again where a chunk sees another round's; and, with
    `causal`, about half. Hashes and the sort, a few products of a token, do not count.

    Args:
        decisive: the attributes of a node.
        tokens: of the text.
        heads: of the attention.
    """
    sizes = np.tile(sizes_of_chunks(tokens, decisive["chunk"], decisive["multiple"]), decisive["rounds"])
    return heads * int((sizes * seen_keys(sizes, decisive["before"], decisive["after"])).sum())
