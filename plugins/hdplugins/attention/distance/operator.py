"""Dense attention with a bucketed relative position bias: the attention of T5, MPNet and NEZHA.

Every query sees every key that is not padding. A score is the product of query and key plus a relative position bias,
and a row that depends on the relative position may be added to a key's value, too. Distances beyond `reach` are clipped
to `reach`, so that both tables have 2 * reach + 1 rows at any sequence length.

The bias is learned and shared by all queries (T5, MPNet), or the product of each query with the rows of a table (Shaw
et al. 2018, "Self-Attention with Relative Position Representations", equations 3 and 4; NEZHA's table is sinusoidal).
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator, Range

OPERATOR = Operator(
    name="ClippedDistanceAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "key_mask", "scores_by_distance", "values_by_distance"),
    optional_inputs=("values_by_distance",),
    attributes={"reach": Range(1), "scale": None},
)
