"""A block of queries of all heads of all texts after another, as ONNX text."""

from __future__ import annotations

__all__ = ["parallel"]

from hdplugins.operators.onnx_text import attention
from hdplugins.operators.relative_attention.onnx_parts import blocks, shifted


def parallel(*, causal: bool, reach: int, segments: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        causal: whether queries see no key behind them.
        reach: distances that a query sees; 0 for all.
        segments: whether there are `segment_scores`.
    """
    text = "own_query = Identity (query)\n"
    text += blocks(is_fixed=True, causal=causal, reach=reach, segments=segments)
    text += _STEPS + (_SEGMENT_STEPS if segments else "")
    return text + _SCAN.format(
        distances=_DISTANCE_BIAS if causal or reach else "by_row = Identity (float_by_row)\n",
        shifted=shifted("by_row", "by_key", axes=4),
        segments=_SEGMENT_BIAS if segments else "bias = Identity (key_scores)\n",
        attention=attention("block_content", "key", "value", "bias", "sums", axes=4, scaled=True),
    )


_STEPS = """
    blocks_shape = Concat <axis = 0> (zero_1d, zero_1d, num_blocks_1d, block_1d, head_dim_1d)
    content_by_text = Reshape (content_query, blocks_shape)
    position_by_text = Reshape (position_query, blocks_shape)
    content_blocks = Transpose <perm = [2, 0, 1, 3, 4]> (content_by_text)
    position_blocks = Transpose <perm = [2, 0, 1, 3, 4]> (position_by_text)
    column_numbers = Range (zero, width, one)
    key_bias_axes = Constant <value_ints = [1, 2]> ()
    key_bias_rows = Unsqueeze (key_bias, key_bias_axes)
"""

_SEGMENT_STEPS = """
    kind_shape = Concat <axis = 0> (zero_1d, one_1d, num_blocks_1d, block_1d, one_1d)
    kind_by_text = Reshape (padded_kind, kind_shape)
    kind_blocks = Transpose <perm = [2, 0, 1, 3, 4]> (kind_by_text)
    scores_shape = Concat <axis = 0> (zero_1d, zero_1d, num_blocks_1d, block_1d, one_1d)
    scores_by_text = Reshape (padded_segment_scores, scores_shape)
    segment_score_blocks = Transpose <perm = [2, 0, 1, 3, 4]> (scores_by_text)
    key_kind_rows = Unsqueeze (key_kind, key_bias_axes)
"""

_DISTANCE_BIAS = """
    row_bias = Gather <axis = 0> (distance_bias, rows)
    by_row = Add (float_by_row, row_bias)
"""

_SEGMENT_BIAS = """
    block_kind = Gather <axis = 0> (kind_blocks, number)
    block_segment_scores = Gather <axis = 0> (segment_score_blocks, number)
    is_same = Equal (block_kind, key_kind_rows)
    segment_bias = Where (is_same, seen_score, block_segment_scores)
    bias = Add (key_scores, segment_bias)
"""

# TensorRT's parser refuses a Scan without a state, so the block's number is one. Blocks are of a fixed size: where it
# is that of a shorter text, TensorRT plans twenty times the memory. Where at the end, not a product: the
# sums of padded queries may be anything.
_SCAN = """
    all_blocks, scanned_rows = Scan <num_scan_inputs = 1, body = attend (int64 number, int64 first_row) => (
        int64 next_number, float[batch, heads, block, head_dim] wide_sums
    ) {{
        next_number = Add (number, one)
        block_content = Gather <axis = 0> (content_blocks, number)
        block_position = Gather <axis = 0> (position_blocks, number)
        rows = Add (column_numbers, first_row)
        block_positions = Gather <axis = 1> (all_positions, rows)
        turned_positions = Transpose <perm = [0, 2, 1]> (block_positions)
        typed_by_row = MatMul (block_position, turned_positions)
        float_by_row = Cast <to = 1> (typed_by_row)
        {distances}
        {shifted}
        key_scores = Add (by_key, key_bias_rows)
        {segments}
        {attention}
        wide_sums = Cast <to = 1> (sums)
    }}> (zero, first_rows)
    turned_rows = Transpose <perm = [1, 2, 0, 3, 4]> (scanned_rows)
    all_rows_shape = Concat <axis = 0> (batch_1d, heads_1d, padded_1d, head_dim_1d)
    float_rows = Reshape (turned_rows, all_rows_shape)
    padded_rows = CastLike (float_rows, query)
    rows_of_text = Slice (padded_rows, missing_1d, padded_1d, two_1d)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    nothing = CastLike (seen_score, query)
    attended = Where (real_rows, rows_of_text, nothing)
"""
