"""The work of FAVOR+: every query and every key with every feature, twice."""

from __future__ import annotations

__all__ = ["pairs"]


def pairs(
    *,
    tokens: int,
    heads: int,
    global_tokens: int = 0,
    features: int,
    scale: float | None = None,
    epsilon: float | None = None,
    compat: int | None = None,
) -> int:
    """Features of one text without padding, of queries and of keys, in all its heads.

    As many as dense attention has pairs of a query and a key for the same number of operations: a feature of a query is
    a product of two rows, as is a score, and weighs a row of sums; likewise one of a key.

    Args:
        tokens: of the text.
        heads: of the attention.
        global_tokens: unused.
        features: of a vector.
        scale: unused.
        epsilon: unused.
        compat: unused: nothing is padding.
    """
    return heads * 2 * tokens * features
