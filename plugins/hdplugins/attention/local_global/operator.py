"""Local attention with biases by distance, and with side keys that every query sees: that of LongT5.

A query sees the tokens around it, each with a learned number of its distance. Side keys are few and of the whole text:
LongT5 makes them of the sums of blocks of tokens. They have numbers as well, of the distance in blocks.

It is an operator of its own, not `SlidingWindowAttention` with further inputs: that one's global keys are tokens of the
text, which windows leave out and a table finds, its heads may be dilated, and its kernel and plugin take four inputs.
Each of that would have to be defined, and refused, together with biases and side keys, which no model does.

It has no kernel of ours: its body is products and a softmax, which TensorRT fuses.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="LocalGlobalAttention",
    version=1,
    package=__package__,
    inputs=("query", "key", "value", "token_mask", "local_bias", "side_key", "side_value", "side_bias"),
    optional_inputs=("side_key", "side_value", "side_bias"),
    attributes=("radius", "side_tokens", "side_reach", "scale"),
)
