"""What both orders of relative attention are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["blocks", "shifted"]

from hdplugins.operators.query_blocks import query_blocks


def blocks(*, is_fixed: bool, causal: bool, reach: int, segments: bool) -> str:
    """Text of :func:`hdplugins.operators.query_blocks.query_blocks`, for blocks that end with the text.

    The first block is filled up in front. It also makes `content_query` and `position_query`, scaled, with their
    biases, [batch, heads, padded, head_dim]; `all_positions`, [heads, padded + keys, head_dim], of which a block takes
    the rows from its number in `first_rows` on, as many as its scores have before they are shifted; `distance_bias`,
    [padded + keys], if any distance is not seen; `key_bias`, [batch, keys]; and `real`, [batch, tokens].

    Args:
        is_fixed: whether blocks of shorter texts are as large; else they are as large as the text.
        causal: whether queries see no key behind them.
        reach: distances that a query sees; 0 for all.
        segments: whether there are `segment_scores`. If so, there are `padded_kind` as well, [batch, padded], and
            `padded_segment_scores`, float32, [batch, heads, padded], scaled.
    """
    text = query_blocks(is_fixed=is_fixed) + _TO_END
    hidden = [name for name, is_hidden in (("is_behind", causal), ("is_far", reach)) if is_hidden]
    if hidden:
        either = f"Or ({', '.join(hidden)})" if len(hidden) > 1 else f"Identity ({hidden[0]})"
        text += _DISTANCES.format(reach=reach, hidden=either)
    return text + (_SEGMENTS if segments else "")


def shifted(source: str, result: str, *, axes: int) -> str:
    """Text that makes `result`, [..., block, keys], of `source`, [..., block, keys + block].

    Row r of the result begins in column block - 1 - r: flattened, each row begins one number less than a row after the
    one before it.

    Args:
        source: name of the scores by row of the positions.
        result: name of the scores by key.
        axes: how many axes both have.
    """
    zeros = ["zero_1d"] * (axes - 2)
    return _SHIFTED.format(
        source=source,
        result=result,
        flat_shape=[*([0] * (axes - 2)), -1],
        flat_axis=axes - 2,
        rows_shape=", ".join([*zeros, "block_1d", "shorter_1d"]),
        columns_axis=axes - 1,
    )


_TO_END = """
    keys_1d = Shape <start = 1, end = 2> (key_kind)
    keys = Squeeze (keys_1d)
    blocks_behind = Sub (last_block, block_numbers)
    first_rows = Mul (blocks_behind, block)
    before_tokens = Concat <axis = 0> (
        zero_1d, zero_1d, missing_1d, zero_1d, zero_1d, zero_1d, zero_1d, zero_1d
    )
    padded_query = Pad (own_query, before_tokens)
    content_bias_rows = Unsqueeze (content_bias, one_1d)
    typed_content_bias = CastLike (content_bias_rows, own_query)
    content_sum = Add (padded_query, typed_content_bias)
    content_query = Mul (content_sum, typed_scale)
    position_bias_rows = Unsqueeze (position_bias, one_1d)
    typed_position_bias = CastLike (position_bias_rows, own_query)
    position_sum = Add (padded_query, typed_position_bias)
    position_query = Mul (position_sum, typed_scale)
    width = Add (keys, block)
    width_1d = Unsqueeze (width, zero_1d)
    num_rows = Add (keys, padded)
    num_rows_1d = Unsqueeze (num_rows, zero_1d)
    used_positions = Slice (positions, zero_1d, num_rows_1d, one_1d)
    used_rows_1d = Shape <start = 1, end = 2> (used_positions)
    missing_rows_1d = Sub (num_rows_1d, used_rows_1d)
    after_rows = Concat <axis = 0> (zero_1d, zero_1d, zero_1d, zero_1d, missing_rows_1d, zero_1d)
    typed_positions = CastLike (used_positions, own_query)
    all_positions = Pad (typed_positions, after_rows)
    shift = Sub (block, one)
    shift_1d = Unsqueeze (shift, zero_1d)
    shorter = Sub (width, one)
    shorter_1d = Unsqueeze (shorter, zero_1d)
    kept = Mul (block, shorter)
    kept_end = Add (kept, shift)
    kept_end_1d = Unsqueeze (kept_end, zero_1d)
    is_real_key = Cast <to = 9> (key_kind)
    key_bias = Where (is_real_key, seen_score, masked_score)
    memory_1d = Sub (keys_1d, tokens_1d)
    own_kind = Slice (key_kind, memory_1d, keys_1d, one_1d)
    real = Cast <to = 9> (own_kind)
"""

# Row `keys - 1` is that of distance 0.
_DISTANCES = """
    row_numbers = Range (zero, num_rows, one)
    reach = Constant <value_int = {reach}> ()
    first_seen_row = Sub (keys, reach)
    is_far = Less (row_numbers, first_seen_row)
    is_behind = GreaterOrEqual (row_numbers, keys)
    is_hidden = {hidden}
    distance_bias = Where (is_hidden, masked_score, seen_score)
"""

_SEGMENTS = """
    before_own_kind = Concat <axis = 0> (zero_1d, missing_1d, zero_1d, zero_1d)
    padded_kind = Pad (own_kind, before_own_kind)
    float_segment_scores = Cast <to = 1> (segment_scores)
    scaled_segment_scores = Mul (float_segment_scores, scale)
    before_scores = Concat <axis = 0> (zero_1d, zero_1d, missing_1d, zero_1d, zero_1d, zero_1d)
    padded_segment_scores = Pad (scaled_segment_scores, before_scores)
"""

_SHIFTED = """
    {source}_flat_shape = Constant <value_ints = {flat_shape}> ()
    {source}_flat = Reshape ({source}, {source}_flat_shape)
    {source}_flat_axis = Constant <value_ints = [{flat_axis}]> ()
    {source}_kept = Slice ({source}_flat, shift_1d, kept_end_1d, {source}_flat_axis)
    {source}_rows_shape = Concat <axis = 0> ({rows_shape})
    {source}_rows = Reshape ({source}_kept, {source}_rows_shape)
    {source}_columns_axis = Constant <value_ints = [{columns_axis}]> ()
    {result} = Slice ({source}_rows, zero_1d, keys_1d, {source}_columns_axis)
"""
