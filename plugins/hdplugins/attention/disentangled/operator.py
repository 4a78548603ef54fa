"""Disentangled attention of DeBERTa: scores of content to content, content to position and position to content.

Every query sees every key that is not padding. A score is the sum of three products: query and key, query and a row of
one table, key and a row of another table. The distance of the key from the query decides the row: each near distance
has a row, farther distances share rows, and all distances beyond `reach` have one row.

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
