"""LSH attention: tokens are sorted by hashes of their shared queries and keys, and attend to those sorted next to them.

It is the attention of Reformer (Kitaev, Kaiser and Levskaya, 2020) as Hugging Face evaluates it. What each attribute
means stands in `reference`, and what a hash is in `hashing`.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="LSHAttention",
    version=1,
    package=__package__,
    inputs=("query_key", "value", "token_mask", "rotations"),
    states=2,
    attributes=("chunk", "before", "after", "buckets", "rounds", "multiple", "causal", "ends_by_row", "scale"),
    counts_in_floats=True,  # of the stable sort by hashes
)
