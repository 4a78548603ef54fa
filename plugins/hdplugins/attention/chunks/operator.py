"""Chunk attention: a chunk of tokens sees itself and the chunks around it, as if the text were a circle.

It is the attention of Reformer's ``local`` layers. What each attribute means stands in `reference`.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="ChunkAttention",
    version=1,
    package=__package__,
    inputs=("query", "key", "value", "token_mask"),
    attributes=("chunk", "before", "after", "multiple", "causal", "scale"),
    faster_in_openvino=("bfloat16",),
)
