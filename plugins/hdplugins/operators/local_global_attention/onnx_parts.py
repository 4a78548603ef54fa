"""What both orders of local attention with sides are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["blocks"]


def blocks(*, is_fixed: bool, radius: int, block: int, side_tokens: int) -> str:
    """Text that cuts a text into blocks of queries, and says how the scores of each block are biased.

    A block of queries meets a span of keys, `reach` more on each side: row q of a block has the distance s - q - reach
    from key s of its span, in every block. Everything is computed of `token_mask` and the tables, so that a runtime
    sees that all layers of a model need the same.

    It makes `span_bias`, float32, [heads, block, span], of distances; `padded_key_bias`, float32, [batch, padded + 2 *
    reach], of padding; `block_starts`, [blocks]; and, if there are sides, `side_key_bias`, float32, [batch, sides], and
    `own_side`, [batch, tokens].

    Args:
        is_fixed: whether blocks and spans of shorter texts are as large; else they are no larger than the text needs.
        radius: tokens that a query sees on each side.
        block: queries of a block.
        side_tokens: tokens of a side; 0 for no sides.
    """
    text = _BLOCKS.format(
        radius=radius,
        most=block,
        block="Identity (most_queries)" if is_fixed else "Min (most_queries, tokens)",
        reach="Identity (radius)" if is_fixed else "Min (radius, last_token)",
    )
    return text + (_SIDES.format(side_tokens=side_tokens) if side_tokens else "")


# In span_bias, entry 0 of the padded tables is for keys on the left of a window, the last one for those on its right.
_BLOCKS = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    any_number = Constant <value_ints = [-1]> ()
    last_axis = Constant <value_ints = [-1]> ()
    seen_score = Constant <value_float = 0.0> ()
    masked_score = Constant <value_float = -1.0e30> ()
    scale = Constant <value_float: float = @scale> ()
    radius = Constant <value_int = {radius}> ()
    most_queries = Constant <value_int = {most}> ()
    tokens_1d = Shape <start = 1, end = 2> (token_mask)
    tokens = Squeeze (tokens_1d)
    last_token = Sub (tokens, one)
    block = {block}
    block_1d = Unsqueeze (block, zero_1d)
    reach = {reach}
    reach_1d = Unsqueeze (reach, zero_1d)
    both_reaches = Mul (reach, two)
    span = Add (block, both_reaches)
    span_1d = Unsqueeze (span, zero_1d)
    last_block = Div (last_token, block)
    num_blocks = Add (last_block, one)
    num_blocks_1d = Unsqueeze (num_blocks, zero_1d)
    padded = Mul (num_blocks, block)
    padded_1d = Unsqueeze (padded, zero_1d)
    behind_1d = Sub (padded_1d, tokens_1d)
    reach_behind_1d = Add (behind_1d, reach_1d)
    block_numbers = Range (zero, num_blocks, one)
    block_starts = Mul (block_numbers, block)
    real = Cast <to = 9> (token_mask)
    key_bias = Where (real, seen_score, masked_score)
    around_keys = Concat <axis = 0> (zero_1d, reach_1d, zero_1d, reach_behind_1d)
    padded_key_bias = Pad (key_bias, around_keys, masked_score)
    span_numbers = Range (zero, span, one)
    block_rows = Range (zero, block, one)
    block_column = Unsqueeze (block_rows, one_1d)
    steps = Sub (span_numbers, block_column)
    narrower = Sub (radius, reach)
    distance_rows = Add (steps, narrower)
    left_of_window = Constant <value_int = -1> ()
    both_radii = Mul (radius, two)
    right_of_window = Add (both_radii, one)
    not_below = Max (distance_rows, left_of_window)
    clipped_rows = Min (not_below, right_of_window)
    table_rows = Add (clipped_rows, one)
    float_local_bias = Cast <to = 1> (local_bias)
    around_table = Constant <value_ints = [0, 1, 0, 1]> ()
    local_table = Pad (float_local_bias, around_table, masked_score)
    span_bias = Gather <axis = 1> (local_table, table_rows)
"""

# Texts without a whole block have the side -1 for all tokens, and see none: any row of the table serves.
_SIDES = """
    side_tokens = Constant <value_int = {side_tokens}> ()
    last_of_side = Sub (side_tokens, one)
    token_numbers = Range (zero, tokens, one)
    place_in_side = Mod (token_numbers, side_tokens)
    is_end = Equal (place_in_side, last_of_side)
    is_real_end = And (real, is_end)
    real_ends = Cast <to = 7> (is_real_end)
    whole = ReduceSum <keepdims = 1> (real_ends, one_1d)
    last_side = Sub (whole, one)
    side_in_row = Div (token_numbers, side_tokens)
    least_side = Min (side_in_row, last_side)
    own_side = Max (least_side, zero)
    last_in_row = Div (last_token, side_tokens)
    num_sides = Add (last_in_row, one)
    num_sides_1d = Unsqueeze (num_sides, zero_1d)
    side_numbers = Range (zero, num_sides, one)
    is_seen_side = Less (side_numbers, whole)
    side_key_bias = Where (is_seen_side, seen_score, masked_score)
    side_reach = Constant <value_int: int = @side_reach> ()
    least_distance = Neg (side_reach)
    float_side_bias = Cast <to = 1> (side_bias)
"""
