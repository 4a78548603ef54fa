"""Relative attention: a query sees the text and what is remembered before it, and scores depend on distances.

It is the attention of Transformer-XL and XLNet. What each attribute means stands in `reference`.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="RelativeAttention",
    version=1,
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
    attributes=("causal", "reach", "scale"),
)
