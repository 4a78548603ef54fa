"""Local attention with relative position bias, and with side keys that every query sees: the attention of LongT5.

A query sees the tokens around it, with a learned bias for each distance. Side keys are few and summarize the whole
sequence: LongT5 computes them from the sums of blocks of tokens. They have a bias for each distance in blocks.

It is not `SlidingWindowAttention` with further inputs: global keys of `SlidingWindowAttention` are tokens of the
sequence, its heads may be dilated, and its kernel and plugin take four inputs. Combinations with biases and side keys
would have to be defined and rejected, and no model uses them.

It has no Triton kernel: its function body is matmuls and a softmax, which engines fuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdplugins.attention.operator import Operator, Range


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries with the tokens around them, and with the sides; see `Operator.pairs`."""
    import numpy as np

    radius, side_tokens = attributes["radius"], attributes["side_tokens"]
    positions = np.arange(tokens)
    first, last = np.maximum(positions - radius, 0), np.minimum(positions + radius, tokens - 1)
    sides = tokens * (tokens // side_tokens) if side_tokens else 0
    return heads * (int((last - first + 1).sum()) + sides)


OPERATOR = Operator(
    name="LocalGlobalAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "token_mask", "local_bias", "side_key", "side_value", "side_bias"),
    optional_inputs=("side_key", "side_value", "side_bias"),
    attributes={"radius": Range(0), "side_tokens": None, "side_reach": None, "scale": None},
    pairs=pairs,
)


def check_sides(*, side_tokens: int, side_reach: int, has_sides: bool) -> None:
    """Raise a ValueError for side attributes without side inputs, and for side inputs without side attributes."""
    if has_sides and (side_tokens < 1 or side_reach < 1):
        raise ValueError(
            f"There are sides, and side_tokens is {side_tokens} and side_reach {side_reach}; both must be 1 or more."
        )
    if not has_sides and (side_tokens or side_reach):
        raise ValueError(
            f"There are no sides, but side_tokens is {side_tokens} and side_reach {side_reach}; both must be 0."
        )
