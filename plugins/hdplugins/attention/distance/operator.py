"""Dense attention with terms of the clipped distance: that of T5, MPNet and NEZHA.

Every query sees every key that is not padding. A score is the product of query and key plus a number that belongs to
the key's distance from the query, and a key's value may have a row added that belongs to its distance, too. Distances
beyond `reach` count as `reach`, so both come from tables of 2 * reach + 1 rows, whatever the length of the text.

The numbers of distances are T5's and MPNet's learned biases, the same for all queries, or the products of each query
with the rows of a table (Shaw et al. 2018, "Self-Attention with Relative Position Representations", equations 3 and 4;
NEZHA's table is of sines).
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
