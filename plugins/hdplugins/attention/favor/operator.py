"""FAVOR+: softmax attention estimated by random features, in time and memory linear in tokens.

It is the attention of Performers (Choromanski et al. 2021, "Rethinking Attention with Performers", equations 4 and 5,
with the stabilisers of the authors' code). Queries and keys become vectors of positive features whose products estimate
the exponentials of the scores, so that keys and values are summed once, for all queries. `reference` defines each
attribute; `draw_projection` there draws the features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hdplugins.attention.operator import FLAG, Operator, Range


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Features of queries and of keys, as many as dense attention has pairs for the same number of operations.

    A feature of a query is a product of two rows, like a score, and weights a row of sums; so does a feature of a key.
    """
    return heads * 2 * tokens * int(attributes["features"])


def _check_fit(attributes: Mapping[str, Any]) -> None:
    epsilon = attributes["epsilon"]
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}; it must be above 0, e.g. 0.0001.")


OPERATOR = Operator(
    name="FavorAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "key_mask", "projection"),
    attributes={"features": Range(1), "scale": None, "epsilon": None, "compat": FLAG},
    check_fit=_check_fit,
    pairs=pairs,
)
