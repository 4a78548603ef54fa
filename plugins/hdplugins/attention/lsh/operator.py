"""LSH attention: tokens are sorted by hashes of their shared queries and keys, and attend to tokens near them.

It is the attention of Reformer (Kitaev, Kaiser and Levskaya, 2020) as Hugging Face evaluates it. `reference` defines
each attribute, and `hash_tokens` there defines a hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdplugins.attention.chunks.operator import CIRCLE, check_chunks, seen_keys, sizes_of_chunks
from hdplugins.attention.operator import FLAG, Operator, Range


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Scores of queries, in each round, with the keys of their chunks; see `Operator.pairs`.

    Hashes decide which tokens meet, but not the number of scores: chunks are full except the last real chunk of a
    round. A chunk that is seen several times counts once. Some of the scores are of masked keys: the key of the query's
    token in each round, and, with `causal`, about half of the keys. Hashes and the sort, a few products per token, do
    not count.
    """
    import numpy as np

    sizes = np.tile(sizes_of_chunks(tokens, attributes["chunk"], attributes["multiple"]), attributes["rounds"])
    return heads * int((sizes * seen_keys(sizes, attributes["before"], attributes["after"])).sum())


def _check_fit(attributes: Mapping[str, Any]) -> None:
    check_chunks(attributes)
    buckets = attributes["buckets"]
    if not buckets or any(factor < 2 or factor % 2 for factor in buckets):
        raise ValueError(f"buckets is {list(buckets)}; it must be even numbers of 2 or more.")


OPERATOR = Operator(
    name="LSHAttention",
    version=2,
    package=__package__,
    inputs=("query_key", "value", "token_mask", "rotations"),
    states=2,
    attributes={
        **CIRCLE,
        "buckets": None,
        "rounds": Range(1),
        "multiple": None,
        "causal": FLAG,
        "ends_by_row": FLAG,
        "scale": None,
    },
    check_fit=_check_fit,
    pairs=pairs,
    counts_in_floats=True,  # of the stable sort by hashes
)


def check_rotations(shape: Sequence[int], *, heads: int, head_dim: int, buckets: Sequence[int], rounds: int) -> None:
    """Raise a ValueError for rotations whose shape does not fit the buckets, rounds and heads."""
    expected = [heads, head_dim, rounds, sum(buckets) // 2]
    if list(shape) != expected:
        raise ValueError(f"rotations is {list(shape)}; it must be [heads, head_dim, rounds, directions], {expected}.")
