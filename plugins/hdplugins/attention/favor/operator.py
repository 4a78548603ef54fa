"""FAVOR+: softmax attention estimated by random features, in time and memory linear in tokens.

It is the attention of Performers (Choromanski et al. 2021, "Rethinking Attention with Performers", equations 4 and 5,
with the stabilisers of the authors' code). Queries and keys become vectors of positive features whose products
estimate the exponentials of the scores, so that keys and values are summed up once, for all queries. What each
attribute means stands in `reference`, and how the features are drawn in `features`.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="FavorAttention",
    version=1,
    package=__package__,
    inputs=("query", "key", "value", "key_mask", "projection"),
    attributes=("features", "scale", "epsilon", "compat"),
)
