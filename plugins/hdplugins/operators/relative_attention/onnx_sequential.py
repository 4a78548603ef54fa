"""One head of one text after another, and blocks of its queries one after another, as ONNX text."""

from __future__ import annotations

__all__ = ["sequential"]

from hdplugins.operators.onnx_text import heads_and_tokens
from hdplugins.operators.query_blocks import STEPS_OF_HEADS
from hdplugins.operators.relative_attention import OPERATOR
from hdplugins.operators.relative_attention.onnx_parts import blocks, shifted


def sequential(*, causal: bool, reach: int, segments: bool, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        causal: whether queries see no key behind them.
        reach: distances that a query sees; 0 for all.
        segments: whether there are `segment_scores`.
        tokens_first: the states and `attended` are [batch, tokens, heads, head_dim] instead, as the projections around
            have them.
    """
    text = "".join(
        heads_and_tokens(state, f"typed_{state}", swapped=tokens_first)
        + f"own_{state} = Cast <to = 1> (typed_{state})\n"
        for state in OPERATOR.state_names
    )
    text += blocks(is_fixed=False, causal=causal, reach=reach, segments=segments)
    text += STEPS_OF_HEADS + _STEPS + (_SEGMENT_STEPS if segments else "")
    text += _SCAN_HEADS.format(
        head_segments=_HEAD_SEGMENTS if segments else "",
        by_row=_BY_SEEN_ROW if causal or reach else _BY_ROW,
        shifted=shifted("by_row", "by_key", axes=2),
        segments=_SEGMENT_BIAS if segments else "bias = Identity (key_scores)\n",
    )
    return text + heads_and_tokens("rows", "attended", swapped=tokens_first)


_STEPS = """
    content_blocks = Reshape (content_query, blocks_shape)
    position_blocks = Reshape (position_query, blocks_shape)
    keys_shape = Concat <axis = 0> (any_number, keys_1d, head_dim_1d)
    head_keys = Reshape (own_key, keys_shape)
    head_values = Reshape (own_value, keys_shape)
"""

_SEGMENT_STEPS = """
    columns_shape = Concat <axis = 0> (any_number, num_blocks_1d, block_1d, one_1d)
    kind_blocks = Reshape (padded_kind, columns_shape)
    segment_score_blocks = Reshape (padded_segment_scores, columns_shape)
"""

_HEAD_SEGMENTS = """
    text_kinds = Gather <axis = 0> (key_kind, text)
    own_kinds = Gather <axis = 0> (kind_blocks, text)
    own_segment_scores = Gather <axis = 0> (segment_score_blocks, step)
"""

_BY_ROW = """
    by_row = Gemm <transB = 1> (block_position, block_positions)
"""

_BY_SEEN_ROW = """
    row_bias = Slice (distance_bias, first_1d, end_1d, zero_1d)
    by_row = Gemm <transB = 1> (block_position, block_positions, row_bias)
"""

# On a CPU a product is faster than a choice.
_SEGMENT_BIAS = """
    block_kind = Gather <axis = 0> (own_kinds, number)
    block_segment_scores = Gather <axis = 0> (own_segment_scores, number)
    is_same = Equal (block_kind, text_kinds)
    is_other = Not (is_same)
    differs = Cast <to = 1> (is_other)
    segment_bias = Mul (differs, block_segment_scores)
    bias = Add (key_scores, segment_bias)
"""

# A step is a head of a text, a step in it a block of queries. Where at the end, not a product: the sums of padded
# queries may be anything.
_SCAN_HEADS = """
    scanned = Scan <num_scan_inputs = 7, body = attend_head (
        int64 step, int64 text, int64 head, float[num_blocks, block, head_dim] content_queries,
        float[num_blocks, block, head_dim] position_queries, float[keys, head_dim] head_key,
        float[keys, head_dim] head_value
    ) => (float[padded, head_dim] head_rows) {{
        head_positions = Gather <axis = 0> (all_positions, head)
        text_bias = Gather <axis = 0> (key_bias, text)
        {head_segments}
        block_rows = Scan <num_scan_inputs = 4, body = attend (
            int64 number, int64 first_row, float[block, head_dim] block_content, float[block, head_dim] block_position
        ) => (float[block, head_dim] sums) {{
            first_1d = Unsqueeze (first_row, zero_1d)
            end_1d = Add (first_1d, width_1d)
            block_positions = Slice (head_positions, first_1d, end_1d, zero_1d)
            {by_row}
            {shifted}
            key_scores = Add (by_key, text_bias)
            {segments}
            scores = Gemm <transB = 1> (block_content, head_key, bias)
            weights = Softmax <axis = -1> (scores)
            sums = MatMul (weights, head_value)
        }}> (block_numbers, first_rows, content_queries, position_queries)
        head_rows = Reshape (block_rows, rows_shape)
    }}> (step_numbers, step_texts, step_heads, content_blocks, position_blocks, head_keys, head_values)
    rows_and_more = Reshape (scanned, text_heads_shape)
    rows_of_text = Slice (rows_and_more, missing_1d, padded_1d, two_1d)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    float_rows = Where (real_rows, rows_of_text, seen_score)
    rows = CastLike (float_rows, query)
"""
