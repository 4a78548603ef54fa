"""One head of one text after another, and groups of its chunks one after another, as ONNX text."""

from __future__ import annotations

__all__ = ["sequential"]

import math
from collections.abc import Sequence

from hdplugins.operators.lsh_attention import OPERATOR
from hdplugins.operators.lsh_attention.onnx_parts import bias, directions, found_buckets, log_sums
from hdplugins.operators.onnx_text import attention, heads_and_tokens

_GROUP_TOKENS = 512
"""Queries of a step: their scores stay in a CPU's cache. With 256 to 1024 the time hardly differs."""


def sequential(*, chunk: int, seen: int, buckets: Sequence[int], rounds: int, causal: bool, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        chunk: tokens of a chunk.
        seen: chunks that a chunk sees.
        buckets: factors of their number.
        rounds: of hashing.
        causal: whether queries see no key behind them.
        tokens_first: query_key, value and `attended` are [batch, tokens, heads, head_dim] instead, as the projections
            around have them.
    """
    text = "".join(
        heads_and_tokens(state, f"token_{state}", swapped=not tokens_first) for state in OPERATOR.state_names
    )
    text += directions(buckets, rounds)
    text += _STEPS.format(group=max(_GROUP_TOKENS // chunk, 1), span=chunk * seen)
    head_directions = "".join(
        f"head_directions_{number} = Gather <axis = 0> (directions_{number}, head)\n" for number in range(len(buckets))
    )
    found = found_buckets(buckets, rounds, hashed="head_query", directions="head_directions_{}", leading="0")
    several = rounds > 1
    of_group = attention("block_query", "block_key", "block_value", "score_bias", "group_attended", axes=3, scaled=True)
    of_group = _GROUP_ATTENTION.format(
        bias=bias(causal=causal),
        attention=of_group,
        sums=log_sums("group_attended", "group_sums") if several else "",
    )
    outputs = "float[group, chunk, head_dim] group_attended" + (
        ", float[group, chunk, one] group_sums" if several else ""
    )
    body = _HEAD.format(
        head_directions=head_directions,
        found=found,
        behind=math.prod(buckets),
        results="all_attended, all_sums" if several else "all_attended",
        outputs=outputs,
        attention=of_group,
        joined=_JOIN_ROUNDS if several else _ONE_ROUND,
    )
    text += _SCAN_HEADS.format(body=body)
    return text + heads_and_tokens("rows", "attended", swapped=tokens_first)


# A step is a head of a text, a step in it a group of chunks: the last chunk fills the last group up. Rows of all heads
# of all tokens of all texts are numbered through, in that order from the inside.
_STEPS = """
    epsilon = Constant <value_float = 1.0e-6> ()
    batch = Gather (mask_shape, zero)
    heads_1d = Shape <start = 2, end = 3> (token_query_key)
    num_heads = Squeeze (heads_1d)
    head_dim_1d = Shape <start = 3, end = 4> (token_query_key)
    num_steps = Mul (batch, num_heads)
    step_numbers = Range (zero, num_steps, one)
    step_texts = Div (step_numbers, num_heads)
    step_text_heads = Mul (step_texts, num_heads)
    step_heads = Sub (step_numbers, step_text_heads)
    all_rows_shape = Concat <axis = 0> (any_number, head_dim_1d)
    float_query_key = Cast <to = 1> (token_query_key)
    float_value = Cast <to = 1> (token_value)
    all_query_keys = Reshape (float_query_key, all_rows_shape)
    all_values = Reshape (float_value, all_rows_shape)
    tokens_in_text = Min (places, last_token)
    row_offsets = Mul (tokens_in_text, num_heads)
    text_rows = Mul (tokens, num_heads)
    num_tables = Shape <end = 1> (seen_chunks)
    last_table_1d = Sub (num_tables, one_1d)
    last_table = Squeeze (last_table_1d)
    largest_group = Constant <value_int = {group}> ()
    group = Min (largest_group, all_chunks)
    group_1d = Unsqueeze (group, zero_1d)
    last_chunk = Sub (all_chunks, one)
    last_group = Div (last_chunk, group)
    num_groups = Add (last_group, one)
    grouped_chunks = Mul (num_groups, group)
    grouped_range = Range (zero, grouped_chunks, one)
    grouped_numbers = Min (grouped_range, last_chunk)
    grouped_seen = Gather <axis = 1> (seen_chunks, grouped_numbers)
    span_1d = Constant <value_ints = [{span}]> ()
    chunks_shape = Concat <axis = 0> (any_number, chunk_1d)
    query_groups_shape = Concat <axis = 0> (any_number, group_1d, chunk_1d)
    key_groups_shape = Concat <axis = 0> (any_number, group_1d, span_1d)
    place_row = Unsqueeze (places, zero_1d)
    sorting_shape = Concat <axis = 0> (rounds_1d, padded_1d)
    round_places = Expand (place_row, sorting_shape)
    round_range = Range (zero, rounds, one)
    round_range_column = Unsqueeze (round_range, one_1d)
    round_offsets = Mul (round_range_column, padded)
    axis_before_last = Constant <value_ints = [-2]> ()
"""

_HEAD = """
    text_start = Mul (text, text_rows)
    first_row = Add (text_start, head)
    head_rows = Add (row_offsets, first_row)
    head_query = Gather <axis = 0> (all_query_keys, head_rows)
    head_value = Gather <axis = 0> (all_values, head_rows)
    squares = Mul (head_query, head_query)
    mean_squares = ReduceMean <keepdims = 1> (squares, last_axis)
    more_squares = Add (mean_squares, epsilon)
    root = Sqrt (more_squares)
    key_scales = Div (scale, root)
    head_key = Mul (head_query, key_scales)
    head_bias = Gather <axis = 0> (padded_bias, text)
    {head_directions}
    {found}
    found_rounds = Transpose <perm = [1, 0]> (found)
    is_real = Equal (head_bias, seen_score)
    behind = Constant <value_int = {behind}> ()
    sorting = Where (is_real, found_rounds, behind)
    sorting_starts = Mul (sorting, padded)
    unique_sorting = Add (sorting_starts, place_row)
    sorted, order = TopK <largest = 0> (unique_sorting, padded_1d)
    unplaced = Expand (zero, sorting_shape)
    rank = ScatterElements <axis = 1> (unplaced, order, round_places)
    narrow_order = Cast <to = 6> (order)
    chunk_rows = Reshape (narrow_order, chunks_shape)
    query_chunks = Gather <axis = 0> (chunk_rows, grouped_numbers)
    query_groups = Reshape (query_chunks, query_groups_shape)
    table_number = Min (text, last_table)
    seen_by_text = Gather <axis = 0> (grouped_seen, table_number)
    key_chunks = Gather <axis = 0> (chunk_rows, seen_by_text)
    key_groups = Reshape (key_chunks, key_groups_shape)
    {results} = Scan <num_scan_inputs = 2, body = attend (
        int32[group, chunk] query_places, int32[group, span] key_places
    ) => ({outputs}) {{ {attention} }}> (query_groups, key_groups)
    attended_rows = Reshape (all_attended, all_rows_shape)
    sorted_rows = Add (rank, round_offsets)
    row_numbers = Slice (sorted_rows, zero_1d, tokens_1d, one_1d)
    {joined}
"""

_GROUP_ATTENTION = """
    block_query = Gather <axis = 0> (head_query, query_places)
    block_key = Gather <axis = 0> (head_key, key_places)
    block_value = Gather <axis = 0> (head_value, key_places)
    block_bias = Gather <axis = 0> (head_bias, key_places)
    {bias}
    {attention}
    {sums}
"""

_ONE_ROUND = """
    flat_rows = Reshape (row_numbers, any_number)
    head_sums = Gather <axis = 0> (attended_rows, flat_rows)
"""

_JOIN_ROUNDS = """
    token_rows = Transpose <perm = [1, 0]> (row_numbers)
    shares = Gather <axis = 0> (attended_rows, token_rows)
    sums_row = Reshape (all_sums, any_number)
    token_sums = Gather <axis = 0> (sums_row, token_rows)
    round_weights = Softmax <axis = -1> (token_sums)
    round_weight_column = Unsqueeze (round_weights, last_axis)
    weighted_shares = Mul (shares, round_weight_column)
    head_sums = ReduceSum <keepdims = 0> (weighted_shares, one_1d)
"""

_SCAN_HEADS = """
    scanned = Scan <num_scan_inputs = 2, body = attend_head (
        int64 text, int64 head
    ) => (float[tokens, head_dim] real_sums) {{
        {body}
        text_real = Gather <axis = 0> (real, text)
        real_column = Unsqueeze (text_real, one_1d)
        real_sums = Where (real_column, head_sums, seen_score)
    }}> (step_texts, step_heads)
    text_heads_shape = Concat <axis = 0> (batch_1d, heads_1d, tokens_1d, head_dim_1d)
    float_rows = Reshape (scanned, text_heads_shape)
    rows = CastLike (float_rows, query_key)
"""
