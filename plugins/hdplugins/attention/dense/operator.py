"""Dense attention: every query attends to every key that is not padding, or to every such key up to itself.

Several heads of queries may share one head of keys and values.

It has no plugin: lowerings replace it by fused operators of backends. ONNX Runtime on a GPU can run a kernel of
hdexport instead. It is one node in the portable graph, so that lowerings need no pattern matching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdplugins.attention.operator import FLAG, Operator


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    return heads * (tokens * (tokens + 1) // 2 if attributes["causal"] else tokens * tokens)


OPERATOR = Operator(
    name="DenseAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "key_mask"),
    groups_heads=True,
    attributes={"scale": None, "causal": FLAG},
    pairs=pairs,
)
