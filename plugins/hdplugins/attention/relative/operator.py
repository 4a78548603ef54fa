"""Relative attention: a query sees the sequence and the memory cache before it, and scores depend on distances.

It is the attention of Transformer-XL and XLNet. `reference` defines each attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdplugins.attention.operator import FLAG, Operator, Range


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries of the sequence with keys of the memory cache and the sequence; see `Operator.pairs`."""
    import numpy as np

    reach, memory = attributes["reach"], attributes.get("memory", 0)
    own = memory + np.arange(tokens)
    last = own if attributes["causal"] else np.full(tokens, memory + tokens - 1)
    first = np.maximum(own - reach + 1, 0) if reach else np.zeros(tokens, np.int64)
    return heads * int((last - first + 1).sum())


OPERATOR = Operator(
    name="RelativeAttention",
    version=2,
    package=__package__,
    inputs=(
        "query",
        "key",
        "value",
        "key_kind",
        "positions",
        "content_bias",
        "position_bias",
        "segment_scores",
    ),
    optional_inputs=("segment_scores",),
    attributes={"causal": FLAG, "reach": Range(0), "scale": None},
    pairs=pairs,
    products=3,  # query by position, too
    as_dense={"causal": 0, "reach": 0},
)
