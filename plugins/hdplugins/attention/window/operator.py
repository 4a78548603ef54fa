"""Sliding-window attention with global tokens: a query sees the tokens around it, and the global tokens anywhere.

Global *columns*, the keys that every query sees, are part of the operator. Global *rows* are not: the query of a global
token is an ordinary row here. In Longformer those few rows see the whole text, through projections of their own. The
family's graph computes them with standard operators and overwrites the operator's rows: G x tokens of dense attention,
linear in tokens for a bounded G. Inside the operator, every block of queries would have to carry a second set of keys
and values.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="SlidingWindowAttention",
    version=1,
    package=__package__,
    inputs=("query", "key", "value", "token_kind"),
    groups_heads=True,
    attributes=("left", "right", "dilation", "global_bound", "scale"),
    faster_in_openvino=("float32", "bfloat16"),
)
