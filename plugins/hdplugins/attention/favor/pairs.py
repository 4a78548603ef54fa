"""The work of FAVOR+: every query and every key with every feature, twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Features of one text without padding, of queries and of keys, in all its heads.

    As many as dense attention has pairs of a query and a key for the same number of operations: a feature of a query is
    a product of two rows, as is a score, and weighs a row of sums; likewise one of a key.

    Args:
        decisive: the attributes of a node.
        tokens: of the text.
        heads: of the attention.
    """
    return heads * 2 * tokens * int(decisive["features"])
