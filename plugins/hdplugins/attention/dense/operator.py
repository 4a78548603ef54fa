"""Dense attention: every query attends to every key that is not padding, or to every one up to itself.

Several heads of queries may share one of keys and values.

It has no kernel and no plugin of ours: backends have fused operators for it, to which lowerings map
it. Being one node in the portable graph, it is found without matching patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdplugins.attention.operator import Operator


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """See `Operator.pairs`."""
    return heads * (tokens * (tokens + 1) // 2 if attributes["causal"] else tokens * tokens)


OPERATOR = Operator(
    name="DenseAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "key_mask"),
    attributes={"scale": None, "causal": None},
    pairs=pairs,
)
