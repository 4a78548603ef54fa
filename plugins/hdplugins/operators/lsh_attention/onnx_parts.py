"""What both orders of LSH attention are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["bias", "directions", "found_buckets", "log_sums"]

import math
from collections.abc import Sequence


def directions(buckets: Sequence[int], rounds: int) -> str:
    """Text that makes `directions_<factor>` of `rotations`, [heads, head_dim, rounds * factor's buckets].

    They are constants: the directions of each round and their opposites, side by side.
    """
    text, start = "rotation_axis = Constant <value_ints = [3]> ()\n", 0
    for number, factor in enumerate(buckets):
        text += _DIRECTIONS.format(number=number, start=start, end=start + factor // 2, size=rounds * factor)
        start += factor // 2
    return text


def found_buckets(buckets: Sequence[int], rounds: int, *, hashed: str, directions: str, leading: str) -> str:
    """Text that makes `found`, int64, [..., tokens, rounds].

    Args:
        buckets: factors of their number.
        rounds: of hashing.
        hashed: name of what is hashed, [..., tokens, head_dim], float32.
        directions: names of the directions of each factor, with a place for its number.
        leading: how many leading axes the products have, as zeros for a Reshape: "0, 0, 0" for [batch, heads, tokens].
    """
    text = ""
    for number, factor in enumerate(buckets):
        size = math.prod(buckets[:number])
        text += _FOUND.format(
            number=number,
            hashed=hashed,
            directions=directions.format(number),
            shape=f"{leading}, {rounds}, {factor}",
            size=size,
        )
        text += f"sum_{number} = " + (f"Add (sum_{number - 1}, sized_{number})" if number else "Identity (sized_0)")
        text += "\n"
    return text + f"found = Identity (sum_{len(buckets) - 1})\n"


def bias(*, causal: bool) -> str:
    """Text that makes `score_bias`, float32, of `query_places`, `key_places` and the keys' `block_bias`.

    All three have the same leading axes, and the queries or keys of a chunk as the last.

    Args:
        causal: whether queries see no key behind them.
    """
    return _BIAS + (_CAUSAL if causal else "score_bias = Identity (seen_bias)\n")


def log_sums(attended: str, sums: str) -> str:
    """Text that makes the logarithms of the sums of exponentials, [..., queries, 1], of an attention's softmax.

    Args:
        attended: name of the attention's result; see `hdplugins.operators.onnx_text.attention`.
        sums: of the logarithms.
    """
    return _LOG_SUMS.format(attended=attended, sums=sums)


_DIRECTIONS = """
    direction_start_{number} = Constant <value_ints = [{start}]> ()
    direction_end_{number} = Constant <value_ints = [{end}]> ()
    half_{number} = Slice (rotations, direction_start_{number}, direction_end_{number}, rotation_axis)
    opposite_{number} = Neg (half_{number})
    both_halves_{number} = Concat <axis = 3> (half_{number}, opposite_{number})
    directions_shape_{number} = Constant <value_ints = [0, 0, {size}]> ()
    directions_{number} = Reshape (both_halves_{number}, directions_shape_{number})
"""

# The first of equal products wins.
_FOUND = """
    products_{number} = MatMul ({hashed}, {directions})
    products_shape_{number} = Constant <value_ints = [{shape}]> ()
    products_of_rounds_{number} = Reshape (products_{number}, products_shape_{number})
    found_{number} = ArgMax <axis = -1, keepdims = 0> (products_of_rounds_{number})
    size_{number} = Constant <value_int = {size}> ()
    sized_{number} = Mul (found_{number}, size_{number})
"""

# A query that sees no other key in any round sees its own: beside any other score, exp() of this one is exactly 0.
_BIAS = """
    self_score = Constant <value_float = -1.0e15> ()
    query_column = Unsqueeze (query_places, last_axis)
    key_row = Unsqueeze (key_places, axis_before_last)
    bias_row = Unsqueeze (block_bias, axis_before_last)
    is_self = Equal (query_column, key_row)
    seen_bias = Where (is_self, self_score, bias_row)
"""

_CAUSAL = """
    is_behind = Greater (key_row, query_column)
    score_bias = Where (is_behind, masked_score, seen_bias)
"""

# By the largest weight, which is exp(largest score - what is asked for).
_LOG_SUMS = """
    best_scores = ReduceMax <keepdims = 1> ({attended}_biased, last_axis)
    best_weights = ReduceMax <keepdims = 1> ({attended}_weights, last_axis)
    best_logs = Log (best_weights)
    {sums} = Sub (best_scores, best_logs)
"""
