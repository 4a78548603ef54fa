"""All chunks of all rounds in one batch of products, as ONNX text."""

from __future__ import annotations

__all__ = ["parallel"]

import math
from collections.abc import Sequence

from hdplugins.operators.lsh_attention.onnx_parts import bias, directions, found_buckets, log_sums
from hdplugins.operators.lsh_attention.onnx_sort import counting_sort
from hdplugins.operators.onnx_text import attention


def parallel(*, chunk: int, buckets: Sequence[int], rounds: int, causal: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        chunk: tokens of a chunk.
        buckets: factors of their number.
        rounds: of hashing.
        causal: whether queries see no key behind them.
    """
    text = _STATES + directions(buckets, rounds)
    text += found_buckets(buckets, rounds, hashed="float_query", directions="directions_{}", leading="0, 0, 0")
    text += _SORTING.format(behind=math.prod(buckets)) + counting_sort(math.prod(buckets))
    of_chunks = attention("block_query", "block_key", "block_value", "score_bias", "block_sums", axes=5, scaled=True)
    text += _ATTENTION.format(chunk=chunk, bias=bias(causal=causal), attention=of_chunks)
    if rounds > 1:
        text += log_sums("block_sums", "sums") + _JOIN_ROUNDS
    else:
        text += _ONE_ROUND
    return text + _DROP_PADDING


_STATES = """
    typed_scale = CastLike (scale, query_key)
    epsilon = Constant <value_float = 1.0e-6> ()
    float_query = Cast <to = 1> (query_key)
    squares = Mul (float_query, float_query)
    mean_squares = ReduceMean <keepdims = 1> (squares, last_axis)
    more_squares = Add (mean_squares, epsilon)
    root = Sqrt (more_squares)
    float_key = Div (float_query, root)
    key = CastLike (float_key, query_key)
    scaled_query = Mul (query_key, typed_scale)
    batch_and_heads = Shape <start = 0, end = 2> (query_key)
    head_dim_1d = Shape <start = 3, end = 4> (query_key)
    all_rows_shape = Concat <axis = 0> (any_number, head_dim_1d)
    all_queries = Reshape (scaled_query, all_rows_shape)
    all_keys = Reshape (key, all_rows_shape)
    all_values = Reshape (value, all_rows_shape)
"""

# `sorting` is [batch * heads * rounds, padded].
_SORTING = """
    found_rounds = Transpose <perm = [0, 1, 3, 2]> (found)
    found_before = Constant <value_ints = [0, 0, 0, 0, 0, 0, 0]> ()
    found_padding = Concat <axis = 0> (found_before, missing_1d)
    padded_found = Pad (found_rounds, found_padding)
    is_real = Equal (padded_bias, seen_score)
    is_real_row = Unsqueeze (is_real, both_axes)
    behind = Constant <value_int = {behind}> ()
    sorting_of_heads = Where (is_real_row, padded_found, behind)
    sorting_rows_shape = Concat <axis = 0> (any_number, padded_1d)
    sorting = Reshape (sorting_of_heads, sorting_rows_shape)
"""

# Rows of tokens, and chunks, are numbered through all heads of all texts.
_ATTENTION = """
    heads_1d = Shape <start = 1, end = 2> (query_key)
    num_heads = Squeeze (heads_1d)
    batch = Gather (mask_shape, zero)
    all_heads = Mul (batch, num_heads)
    head_range = Range (zero, all_heads, one)
    of_heads = Concat <axis = 0> (batch_and_heads, one_1d, one_1d)
    head_numbers = Reshape (head_range, of_heads)
    chunk_starts = Mul (head_numbers, all_chunks)
    seen_of_heads = Unsqueeze (seen_chunks, one_1d)
    key_chunk_numbers = Add (chunk_starts, seen_of_heads)
    chunk_rows_shape = Constant <value_ints = [-1, {chunk}]> ()
    chunk_rows = Reshape (order, chunk_rows_shape)
    key_chunks = Gather <axis = 0> (chunk_rows, key_chunk_numbers)
    key_places_shape = Constant <value_ints = [0, 0, 0, -1]> ()
    key_places = Reshape (key_chunks, key_places_shape)
    query_places_shape = Concat <axis = 0> (batch_and_heads, all_chunks_1d, chunk_1d)
    query_places = Reshape (order, query_places_shape)
    row_starts = Mul (head_numbers, tokens)
    queries_in_text = Min (query_places, last_token)
    keys_in_text = Min (key_places, last_token)
    query_rows = Add (row_starts, queries_in_text)
    key_rows = Add (row_starts, keys_in_text)
    block_query = Gather <axis = 0> (all_queries, query_rows)
    block_key = Gather <axis = 0> (all_keys, key_rows)
    block_value = Gather <axis = 0> (all_values, key_rows)
    text_range = Range (zero, batch, one)
    text_offsets = Mul (text_range, padded)
    text_axes = Constant <value_ints = [1, 2, 3]> ()
    text_starts = Unsqueeze (text_offsets, text_axes)
    bias_places = Add (text_starts, key_places)
    flat_bias = Reshape (padded_bias, any_number)
    block_bias = Gather <axis = 0> (flat_bias, bias_places)
    axis_before_last = Constant <value_ints = [-2]> ()
    {bias}
    {attention}
    sorted_sums = Reshape (block_sums, all_rows_shape)
    all_rounds = Mul (all_heads, rounds)
    rank_range = Range (zero, all_rounds, one)
    rank_offsets = Mul (rank_range, padded)
    rank_starts = Unsqueeze (rank_offsets, one_1d)
    sorted_places = Add (rank, rank_starts)
    sorted_rows = Slice (sorted_places, zero_1d, tokens_1d, one_1d)
    round_sums = Gather <axis = 0> (sorted_sums, sorted_rows)
"""

_ONE_ROUND = """
    states_shape = Shape (query_key)
    joined = Reshape (round_sums, states_shape)
"""

_JOIN_ROUNDS = """
    flat_log_sums = Reshape (sums, any_number)
    round_log_sums = Gather <axis = 0> (flat_log_sums, sorted_rows)
    log_sums_shape = Concat <axis = 0> (batch_and_heads, rounds_1d, tokens_1d)
    token_log_sums = Reshape (round_log_sums, log_sums_shape)
    round_weights = Softmax <axis = 2> (token_log_sums)
    round_weight_column = Unsqueeze (round_weights, last_axis)
    shares_shape = Concat <axis = 0> (log_sums_shape, head_dim_1d)
    typed_shares = Reshape (round_sums, shares_shape)
    shares = Cast <to = 1> (typed_shares)
    weighted_shares = Mul (shares, round_weight_column)
    float_joined = ReduceSum <keepdims = 0> (weighted_shares, two_1d)
    joined = CastLike (float_joined, query_key)
"""

# Where, not a product: the sums of padded queries may be anything.
_DROP_PADDING = """
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    nothing = CastLike (seen_score, query_key)
    attended = Where (real_rows, joined, nothing)
"""
