"""All blocks of queries in one batch of products, as ONNX text."""

from __future__ import annotations

__all__ = ["parallel"]

from hdplugins.operators.local_global_attention.onnx_parts import blocks


def parallel(*, radius: int, block: int, side_tokens: int) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        radius: tokens that a query sees on each side.
        block: queries of a block.
        side_tokens: tokens of a side; 0 for no sides.
    """
    text = blocks(is_fixed=True, radius=radius, block=block, side_tokens=side_tokens) + _SCORES
    return text + (_WITH_SIDES if side_tokens else _WITHOUT_SIDES) + _ROWS


# Tokens before the text and behind it are stood in for by its first and last; their scores are masked.
_SCORES = """
    typed_scale = CastLike (scale, query)
    starts_column = Unsqueeze (block_starts, one_1d)
    block_tokens = Add (starts_column, block_rows)
    query_index = Min (block_tokens, last_token)
    span_places = Add (starts_column, span_numbers)
    span_tokens = Sub (span_places, reach)
    span_from_first = Max (span_tokens, zero)
    key_index = Min (span_from_first, last_token)
    scaled_query = Mul (query, typed_scale)
    block_query = Gather <axis = 2> (scaled_query, query_index)
    block_key = Gather <axis = 2> (key, key_index)
    block_value = Gather <axis = 2> (value, key_index)
    turned_key = Transpose <perm = [0, 1, 2, 4, 3]> (block_key)
    typed_products = MatMul (block_query, turned_key)
    products = Cast <to = 1> (typed_products)
    span_bias_blocks = Unsqueeze (span_bias, one_1d)
    by_distance = Add (products, span_bias_blocks)
    span_key_bias = Gather <axis = 1> (padded_key_bias, span_places)
    key_bias_axes = Constant <value_ints = [1, 3]> ()
    block_key_bias = Unsqueeze (span_key_bias, key_bias_axes)
    local_scores = Add (by_distance, block_key_bias)
"""

_WITHOUT_SIDES = """
    weights = Softmax <axis = -1> (local_scores)
    typed_weights = CastLike (weights, query)
    block_sums = MatMul (typed_weights, block_value)
"""

_WITH_SIDES = """
    turned_side_key = Transpose <perm = [0, 1, 3, 2]> (side_key)
    block_axis = Constant <value_ints = [2]> ()
    side_key_blocks = Unsqueeze (turned_side_key, block_axis)
    side_value_blocks = Unsqueeze (side_value, block_axis)
    typed_side_products = MatMul (block_query, side_key_blocks)
    side_products = Cast <to = 1> (typed_side_products)
    block_own_side = Gather <axis = 1> (own_side, query_index)
    own_side_column = Unsqueeze (block_own_side, last_axis)
    side_distance = Sub (side_numbers, own_side_column)
    not_left_of_reach = Max (side_distance, least_distance)
    clipped_distance = Min (not_left_of_reach, side_reach)
    side_rows = Add (clipped_distance, side_reach)
    heads_first_bias = Gather <axis = 1> (float_side_bias, side_rows)
    block_side_bias = Transpose <perm = [1, 0, 2, 3, 4]> (heads_first_bias)
    side_by_distance = Add (side_products, block_side_bias)
    side_bias_axes = Constant <value_ints = [1, 2, 3]> ()
    block_side_key_bias = Unsqueeze (side_key_bias, side_bias_axes)
    side_scores = Add (side_by_distance, block_side_key_bias)
    scores = Concat <axis = -1> (local_scores, side_scores)
    weights = Softmax <axis = -1> (scores)
    typed_weights = CastLike (weights, query)
    all_keys_1d = Add (span_1d, num_sides_1d)
    span_weights = Slice (typed_weights, zero_1d, span_1d, last_axis)
    side_weights = Slice (typed_weights, span_1d, all_keys_1d, last_axis)
    span_sums = MatMul (span_weights, block_value)
    side_sums = MatMul (side_weights, side_value_blocks)
    block_sums = Add (span_sums, side_sums)
"""

# Where at the end, not a product: the sums of padded queries may be anything.
_ROWS = """
    kept_axes = Constant <value_ints = [0, 0]> ()
    head_dim_1d = Shape <start = 3, end = 4> (query)
    rows_shape = Concat <axis = 0> (kept_axes, padded_1d, head_dim_1d)
    padded_rows = Reshape (block_sums, rows_shape)
    token_axis = Constant <value_ints = [2]> ()
    rows_of_text = Slice (padded_rows, zero_1d, tokens_1d, token_axis)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    nothing = CastLike (seen_score, query)
    attended = Where (real_rows, rows_of_text, nothing)
"""
