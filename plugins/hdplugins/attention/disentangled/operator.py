"""Disentangled attention: that of DeBERTa, whose scores are of contents, and of contents with distances, both ways.

Every query sees every key that is not padding. A score is the product of query and key, plus that of the query with a
row of one table and that of the key with a row of another. The row belongs to the distance between the two: near
distances have one each, farther ones share theirs with more and more others, and all beyond `reach` are one.

Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (2021), equation 4; the buckets of
distances are those of DeBERTa-v2's code.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator, Range

OPERATOR = Operator(
    name="DisentangledAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "key_mask", "position_keys", "position_queries", "row_of_distance"),
    attributes={"reach": Range(1), "scale": None},
)
