"""Which keys a block of queries sees and how often they count, as ONNX text that needs the token mask alone."""

from __future__ import annotations

__all__ = ["tables"]

from hdplugins.operators.block_sparse_attention.onnx_parts import Parts, ends_of_texts, listing, shifts


def tables(parts: Parts) -> str:
    """Text that makes `bias`, [batch, 1 or heads, blocks, 1, span], and what else both orders need of `token_mask`."""
    text = _SHARED
    if parts.last or parts.dense:
        text += ends_of_texts(parts)
    text += _LAST_BLOCK if parts.last else ""
    text += _global_blocks(parts)
    if parts.front:
        text += _FRONT_BIAS
    if parts.last:
        text += _LAST_BIAS.format(last_block_bias="last_once" if parts.first else "last_keys")
    if parts.window >= 0:
        text += _near_bias(parts.window)
    if parts.listed:
        text += _LISTED
    return text + _bias(parts) + (_SHORT_BY_ROW if parts.by_row else _SHORT_TOGETHER if parts.dense else "")


def _global_blocks(parts: Parts) -> str:
    if not parts.global_rows:
        return "near_key_bias = Identity (key_bias)\n"
    is_global = "Or (is_first, is_last)" if parts.first and parts.last else "Identity ({})"
    is_global = is_global.format("is_last" if parts.last else "is_first")
    return f"""
    is_global = {is_global}
    global_column = Unsqueeze (is_global, last_axis)
    near_key_bias = Where (global_column, masked_score, key_bias)
"""


def _near_bias(window: int) -> str:
    """Text that makes `near_bias`, [batch, blocks, (2 * window + 1) * block]."""
    return f"""
    near_padding = Constant <value_ints = [0, {window}, 0, 0, {window}, 0]> ()
    wide_bias = Pad (near_key_bias, near_padding, masked_score)
    {shifts("wide_bias", "near_bias", window, axis=1)}
"""


def _bias(parts: Parts) -> str:
    """Text that makes `bias`, [batch, 1 or heads, blocks, 1, span]."""
    if not parts.spans:
        return "bias = Identity (listed_bias)\n"
    text = f"""
    row_bias = Concat <axis = 2> ({listing("{}_bias", parts.spans)})
    bias_axes = Constant <value_ints = [1, 3]> ()
    span_bias = Unsqueeze (row_bias, bias_axes)
"""
    return text + (_JOIN_LISTED_BIAS if parts.listed else "bias = Identity (span_bias)\n")


# `key_bias` is [batch, blocks, block]: 0 for real keys; padding, also that which completes the last block, is hidden.
_SHARED = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    two_1d = Constant <value_ints = [2]> ()
    last_axis = Constant <value_ints = [-1]> ()
    both_axes = Constant <value_ints = [1, 2]> ()
    any_number = Constant <value_ints = [-1]> ()
    block = Constant <value_int: int = @block_size> ()
    block_1d = Unsqueeze (block, zero_1d)
    first_global = Constant <value_int: int = @first_global> ()
    scale = Constant <value_float: float = @scale> ()
    typed_scale = CastLike (scale, query)
    seen_score = Constant <value_float = 0.0> ()
    masked_score = Constant <value_float = -1.0e30> ()
    mask_shape = Shape (token_mask)
    batch_1d = Shape <end = 1> (token_mask)
    tokens = Gather (mask_shape, one)
    tokens_1d = Unsqueeze (tokens, zero_1d)
    last_token = Sub (tokens, one)
    last_number = Div (last_token, block)
    blocks = Add (last_number, one)
    blocks_1d = Unsqueeze (blocks, zero_1d)
    whole = Mul (blocks, block)
    missing = Sub (whole, tokens)
    missing_1d = Unsqueeze (missing, zero_1d)
    block_numbers = Range (zero, blocks, one)
    is_first = Less (block_numbers, first_global)
    real = Cast <to = 9> (token_mask)
    token_bias = Where (real, seen_score, masked_score)
    nothing_before = Constant <value_ints = [0, 0, 0]> ()
    token_padding = Concat <axis = 0> (nothing_before, missing_1d)
    padded_bias = Pad (token_bias, token_padding, masked_score)
    of_each_text = Constant <value_ints = [0, -1]> ()
    key_bias_shape = Concat <axis = 0> (of_each_text, block_1d)
    key_bias = Reshape (padded_bias, key_bias_shape)
"""

_LAST_BLOCK = """
    last_column = Unsqueeze (last_block, one_1d)
    is_last = Equal (block_numbers, last_column)
    last_block_index = Max (last_block, zero)
    last_cell = Unsqueeze (last_block_index, both_axes)
"""

# The first blocks, or block 0 if only that is seen again: how often each counts. As much as there is of them.
_FRONT_BIAS = """
    first_repeats = Constant <value_int: int = @first_repeats> ()
    zero_repeats = Min (first_repeats, one)
    front_blocks = Max (first_global, zero_repeats)
    front_end = Unsqueeze (front_blocks, zero_1d)
    first_times = Cast <to = 7> (is_first)
    is_zero = Equal (block_numbers, zero)
    zero_times = Cast <to = 7> (is_zero)
    more_times = Mul (zero_times, first_repeats)
    block_times = Add (first_times, more_times)
    front_counts = Slice (block_times, zero_1d, front_end, zero_1d)
    front_times = Cast <to = 1> (front_counts)
    front_logs = Log (front_times)
    front_column = Unsqueeze (front_logs, one_1d)
    front_keys = Slice (key_bias, zero_1d, front_end, one_1d)
    front_block_bias = Add (front_keys, front_column)
    as_one_row = Constant <value_ints = [0, 1, -1]> ()
    front_row = Reshape (front_block_bias, as_one_row)
    times_blocks = Concat <axis = 0> (one_1d, blocks_1d, one_1d)
    front_bias = Expand (front_row, times_blocks)
"""

_LAST_BIAS = """
    last_bias_shape = Concat <axis = 0> (one_1d, one_1d, block_1d)
    last_bias_index = Expand (last_cell, last_bias_shape)
    last_keys = GatherElements <axis = 1> (key_bias, last_bias_index)
    last_is_first = Less (last_cell, first_global)
    last_once = Where (last_is_first, masked_score, last_keys)
    last_to_blocks = Concat <axis = 0> (one_1d, blocks_1d, one_1d)
    last_bias = Expand ({last_block_bias}, last_to_blocks)
"""

# Rows beyond the table list nothing, and neither do entries that are not a block of the text.
_LISTED = """
    table = Cast <to = 7> (listed_blocks)
    nowhere = Constant <value_int = -1> ()
    first_global_1d = Unsqueeze (first_global, zero_1d)
    table_padding = Concat <axis = 0> (zero_1d, first_global_1d, zero_1d, zero_1d, blocks_1d, zero_1d)
    padded_table = Pad (table, table_padding, nowhere)
    block_table = Slice (padded_table, zero_1d, blocks_1d, one_1d)
    below_end = Less (block_table, blocks)
    above_start = Greater (block_table, nowhere)
    exists = And (below_end, above_start)
    listed_index = Where (exists, block_table, zero)
    exists_bias = Where (exists, seen_score, masked_score)
    exists_column = Unsqueeze (exists_bias, last_axis)
    listed_keys = Gather <axis = 1> (key_bias, listed_index)
    listed_key_bias = Add (listed_keys, exists_column)
    listed_bias_shape = Constant <value_ints = [0, 0, 0, 1, -1]> ()
    listed_bias = Reshape (listed_key_bias, listed_bias_shape)
"""

_JOIN_LISTED_BIAS = """
    listed_heads = Shape <start = 1, end = 2> (listed_bias)
    to_listed_heads = Concat <axis = 0> (one_1d, listed_heads, one_1d, one_1d, one_1d)
    headed_bias = Expand (span_bias, to_listed_heads)
    bias = Concat <axis = 4> (headed_bias, listed_bias)
"""

_SHORT_TOGETHER = """
    dense_tokens = Constant <value_int: int = @dense_tokens> ()
    is_short = LessOrEqual (ends, dense_tokens)
    all_short = LessOrEqual (tokens, dense_tokens)
    any_short = LessOrEqual (tokens, dense_tokens)
"""

_SHORT_BY_ROW = """
    dense_tokens = Constant <value_int: int = @dense_tokens> ()
    is_short = LessOrEqual (ends, dense_tokens)
    longest_end = ReduceMax <keepdims = 0> (ends)
    shortest_end = ReduceMin <keepdims = 0> (ends)
    all_short = LessOrEqual (longest_end, dense_tokens)
    any_short = LessOrEqual (shortest_end, dense_tokens)
"""
