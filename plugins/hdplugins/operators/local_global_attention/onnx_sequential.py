"""One head of one text after another, and blocks of its queries one after another, as ONNX text."""

from __future__ import annotations

__all__ = ["sequential"]

from hdplugins.operators.local_global_attention import OPERATOR
from hdplugins.operators.local_global_attention.onnx_parts import blocks
from hdplugins.operators.onnx_text import heads_and_tokens


def sequential(*, radius: int, block: int, side_tokens: int, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        radius: tokens that a query sees on each side.
        block: queries of a block.
        side_tokens: tokens of a side; 0 for no sides.
        tokens_first: the states and `attended` are [batch, tokens, heads, head_dim] instead, as the projections around
            have them; keys and values of sides are not.
    """
    text = "".join(
        heads_and_tokens(state, f"typed_{state}", swapped=tokens_first)
        + f"own_{state} = Cast <to = 1> (typed_{state})\n"
        for state in OPERATOR.state_names
    )
    text += blocks(is_fixed=False, radius=radius, block=block, side_tokens=side_tokens)
    text += _STEPS + (_SIDE_STEPS if side_tokens else "")
    text += _SCAN_HEADS.format(
        inputs=7 if side_tokens else 5,
        side_states=", float[sides, head_dim] head_side_key, float[sides, head_dim] head_side_value"
        if side_tokens
        else "",
        side_scans=", side_keys, side_values" if side_tokens else "",
        of_head=_SIDES_OF_HEAD if side_tokens else "",
        attend=_ATTEND_WITH_SIDES if side_tokens else _ATTEND,
    )
    return text + heads_and_tokens("rows", "attended", swapped=tokens_first)


# A step is a head of a text, a step in it a block of queries.
_STEPS = """
    batch_1d = Shape <end = 1> (own_query)
    batch = Squeeze (batch_1d)
    heads_1d = Shape <start = 1, end = 2> (own_query)
    num_heads = Squeeze (heads_1d)
    head_dim_1d = Shape <start = 3, end = 4> (own_query)
    num_steps = Mul (batch, num_heads)
    step_numbers = Range (zero, num_steps, one)
    step_texts = Div (step_numbers, num_heads)
    first_steps = Mul (step_texts, num_heads)
    step_heads = Sub (step_numbers, first_steps)
    scaled_query = Mul (own_query, scale)
    behind_queries = Concat <axis = 0> (
        zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, behind_1d, zero_1d
    )
    padded_query = Pad (scaled_query, behind_queries)
    blocks_shape = Concat <axis = 0> (any_number, num_blocks_1d, block_1d, head_dim_1d)
    query_blocks = Reshape (padded_query, blocks_shape)
    around_states = Concat <axis = 0> (
        zero_1d, zero_1d, reach_1d, zero_1d, zero_1d, zero_1d, reach_behind_1d, zero_1d
    )
    padded_key = Pad (own_key, around_states)
    padded_value = Pad (own_value, around_states)
    with_reach_1d = Shape <start = 2, end = 3> (padded_key)
    keys_shape = Concat <axis = 0> (any_number, with_reach_1d, head_dim_1d)
    head_keys = Reshape (padded_key, keys_shape)
    head_values = Reshape (padded_value, keys_shape)
    rows_shape = Concat <axis = 0> (padded_1d, head_dim_1d)
"""

_SIDE_STEPS = """
    float_side_key = Cast <to = 1> (side_key)
    float_side_value = Cast <to = 1> (side_value)
    sides_shape = Concat <axis = 0> (any_number, num_sides_1d, head_dim_1d)
    side_keys = Reshape (float_side_key, sides_shape)
    side_values = Reshape (float_side_value, sides_shape)
    side_column = Unsqueeze (side_numbers, one_1d)
    side_distance = Sub (side_numbers, side_column)
    not_left_of_reach = Max (side_distance, least_distance)
    clipped_distance = Min (not_left_of_reach, side_reach)
    side_rows = Add (clipped_distance, side_reach)
    all_keys_1d = Add (span_1d, num_sides_1d)
    behind_sides = Concat <axis = 0> (zero_1d, zero_1d, zero_1d, behind_1d)
    padded_own_side = Pad (own_side, behind_sides)
    own_side_shape = Concat <axis = 0> (any_number, num_blocks_1d, block_1d)
    own_side_blocks = Reshape (padded_own_side, own_side_shape)
"""

_SIDES_OF_HEAD = """
    head_side_bias = Gather <axis = 0> (float_side_bias, head)
    by_side_distance = Gather <axis = 0> (head_side_bias, side_rows)
    text_side_bias = Gather <axis = 0> (side_key_bias, text)
    bias_of_sides = Add (by_side_distance, text_side_bias)
    own_sides = Gather <axis = 0> (own_side_blocks, text)
"""

_ATTEND = """
    weights = Softmax <axis = -1> (local_scores)
    sums = MatMul (weights, block_value)
"""

_ATTEND_WITH_SIDES = """
    block_sides = Gather <axis = 0> (own_sides, number)
    block_side_bias = Gather <axis = 0> (bias_of_sides, block_sides)
    side_scores = Gemm <transB = 1> (block_query, head_side_key, block_side_bias)
    scores = Concat <axis = -1> (local_scores, side_scores)
    weights = Softmax <axis = -1> (scores)
    span_weights = Slice (weights, zero_1d, span_1d, last_axis)
    side_weights = Slice (weights, span_1d, all_keys_1d, last_axis)
    side_sums = MatMul (side_weights, head_side_value)
    sums = Gemm (span_weights, block_value, side_sums)
"""

# Where at the end, not a product: the sums of padded queries may be anything.
_SCAN_HEADS = """
    scanned = Scan <num_scan_inputs = {inputs}, body = attend_head (
        int64 text, int64 head, float[num_blocks, block, head_dim] queries, float[keys, head_dim] head_key,
        float[keys, head_dim] head_value{side_states}
    ) => (float[padded, head_dim] head_rows) {{
        head_span_bias = Gather <axis = 0> (span_bias, head)
        text_bias = Gather <axis = 0> (padded_key_bias, text)
        {of_head}
        block_sums = Scan <num_scan_inputs = 3, body = attend (
            int64 number, int64 start, float[block, head_dim] block_query
        ) => (float[block, head_dim] sums) {{
            start_1d = Unsqueeze (start, zero_1d)
            end_1d = Add (start_1d, span_1d)
            block_key = Slice (head_key, start_1d, end_1d, zero_1d)
            block_value = Slice (head_value, start_1d, end_1d, zero_1d)
            block_key_bias = Slice (text_bias, start_1d, end_1d, zero_1d)
            bias = Add (head_span_bias, block_key_bias)
            local_scores = Gemm <transB = 1> (block_query, block_key, bias)
            {attend}
        }}> (block_numbers, block_starts, queries)
        head_rows = Reshape (block_sums, rows_shape)
    }}> (step_texts, step_heads, query_blocks, head_keys, head_values{side_scans})
    text_heads_shape = Concat <axis = 0> (batch_1d, heads_1d, padded_1d, head_dim_1d)
    padded_rows = Reshape (scanned, text_heads_shape)
    token_axis = Constant <value_ints = [2]> ()
    rows_of_text = Slice (padded_rows, zero_1d, tokens_1d, token_axis)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    float_rows = Where (real_rows, rows_of_text, seen_score)
    rows = CastLike (float_rows, query)
"""
