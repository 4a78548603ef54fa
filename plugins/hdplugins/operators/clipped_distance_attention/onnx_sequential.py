"""One head of one text after another, and blocks of its queries one after another, as ONNX text."""

from __future__ import annotations

__all__ = ["sequential"]

from hdplugins.operators.clipped_distance_attention import OPERATOR
from hdplugins.operators.clipped_distance_attention.onnx_parts import blocks, shifted_to_distances, shifted_to_keys
from hdplugins.operators.onnx_text import heads_and_tokens
from hdplugins.operators.query_blocks import ROWS_OF_HEADS, STEPS_OF_HEADS


def sequential(*, values: bool, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        values: whether there are `values_by_distance`.
        tokens_first: the states and `attended` are [batch, tokens, heads, head_dim] instead, as the projections around
            have them.
    """
    text = "".join(
        heads_and_tokens(state, f"typed_{state}", swapped=tokens_first)
        + f"own_{state} = Cast <to = 1> (typed_{state})\n"
        for state in OPERATOR.state_names
    )
    text += blocks(is_fixed=False, values=values)
    text += STEPS_OF_HEADS + _STEPS
    text += _SCAN_HEADS.format(
        to_keys=shifted_to_keys("number_columns", "number_band", axes=2),
        sums=_VALUES.format(to_distances=shifted_to_distances("band_weights", "shares", axes=2))
        if values
        else "sums = MatMul (weights, head_value)",
    )
    return text + ROWS_OF_HEADS + heads_and_tokens("rows", "attended", swapped=tokens_first)


_STEPS = """
    number_texts_1d = Shape <end = 1> (scores_by_distance)
    last_number_text_1d = Sub (number_texts_1d, one_1d)
    step_number_texts = Min (step_texts, last_number_text_1d)
    query_blocks = Reshape (scaled_query, blocks_shape)
    keys_shape = Concat <axis = 0> (any_number, tokens_1d, head_dim_1d)
    head_keys = Reshape (own_key, keys_shape)
    head_values = Reshape (own_value, keys_shape)
    moves_1d = Min (last_number_row_1d, one_1d)
    band_behind_1d = Add (block_1d, reach_1d)
"""

_VALUES = """
    far_before_1d = Sub (keys_before_1d, one_1d)
    far_behind_1d = Sub (keys_behind_1d, one_1d)
    around_near = Concat <axis = 0> (far_before_1d, zero_1d, far_behind_1d, zero_1d)
    far_rows = Pad <mode = "edge"> (near_rows, around_near)
    block_value = Add (head_value, far_rows)
    key_sums = MatMul (weights, block_value)
    not_before_1d = Neg (keys_before_1d)
    not_behind_1d = Neg (keys_behind_1d)
    around_weights = Concat <axis = 0> (zero_1d, not_before_1d, zero_1d, not_behind_1d)
    band_weights = Pad (weights, around_weights)
    {to_distances}
    sums = Gemm (shares, value_rows, key_sums)
"""

# Where the text or the band ends, the other is cut off: a Pad by less than nothing. At the edges it copies numbers
# faster than a Gather by a factor of ten. A step is a head of a text, a step in it a block of queries.
_SCAN_HEADS = """
    scanned = Scan <num_scan_inputs = 6, body = attend_head (
        int64 text, int64 number_text, int64 head, float[num_blocks, block, head_dim] queries,
        float[tokens, head_dim] head_key, float[tokens, head_dim] head_value
    ) => (float[padded, head_dim] head_rows) {{
        text_numbers = Gather <axis = 0> (scores_by_distance, number_text)
        head_numbers = Gather <axis = 0> (text_numbers, head)
        text_bias = Gather <axis = 0> (key_bias, text)
        block_rows = Scan <num_scan_inputs = 2, body = attend (
            int64 first_query, float[block, head_dim] block_query
        ) => (float[block, head_dim] sums) {{
            first_1d = Unsqueeze (first_query, zero_1d)
            first_row_1d = Mul (first_1d, moves_1d)
            end_row_1d = Add (first_row_1d, block_1d)
            rows_there = Slice (head_numbers, first_row_1d, end_row_1d, zero_1d)
            float_rows_there = Cast <to = 1> (rows_there)
            num_rows_1d = Shape <end = 1> (rows_there)
            missing_rows_1d = Sub (block_1d, num_rows_1d)
            around_numbers = Concat <axis = 0> (zero_1d, shift_1d, missing_rows_1d, block_1d)
            number_columns = Pad <mode = "edge"> (float_rows_there, around_numbers)
            {to_keys}
            keys_before_1d = Sub (first_1d, reach_1d)
            keys_from_first_1d = Sub (tokens_1d, first_1d)
            keys_behind_1d = Sub (keys_from_first_1d, band_behind_1d)
            around_band = Concat <axis = 0> (zero_1d, keys_before_1d, zero_1d, keys_behind_1d)
            number_scores = Pad <mode = "edge"> (number_band, around_band)
            bias = Add (number_scores, text_bias)
            scores = Gemm <transB = 1> (block_query, head_key, bias)
            weights = Softmax <axis = -1> (scores)
            {sums}
        }}> (first_queries, queries)
        head_rows = Reshape (block_rows, rows_shape)
    }}> (step_texts, step_number_texts, step_heads, query_blocks, head_keys, head_values)
"""
