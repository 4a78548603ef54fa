"""One head of one text after another, and blocks of its queries one after another, as ONNX text."""

from __future__ import annotations

__all__ = ["sequential"]

from hdplugins.operators.disentangled_attention import OPERATOR
from hdplugins.operators.disentangled_attention.onnx_parts import blocks
from hdplugins.operators.onnx_text import heads_and_tokens
from hdplugins.operators.query_blocks import ROWS_OF_HEADS, STEPS_OF_HEADS


def sequential(*, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        tokens_first: the states and `attended` are [batch, tokens, heads, head_dim] instead, as the projections around
            have them.
    """
    text = "".join(
        heads_and_tokens(state, f"typed_{state}", swapped=tokens_first)
        + f"own_{state} = Cast <to = 1> (typed_{state})\n"
        for state in OPERATOR.state_names
    )
    return (
        text
        + _TABLES
        + blocks(is_fixed=False)
        + _BAND
        + STEPS_OF_HEADS
        + _SCAN
        + ROWS_OF_HEADS
        + heads_and_tokens("rows", "attended", swapped=tokens_first)
    )


_TABLES = """
    own_position_keys = Cast <to = 1> (position_keys)
    own_position_queries = Cast <to = 1> (position_queries)
"""

# The band of a block are the keys within the reach of one of its queries: column c of a block's band is the key that is
# c - near tokens behind its first query, so all blocks have the same rows of distances.
_BAND = """
    near = Min (reach, tokens)
    near_1d = Unsqueeze (near, zero_1d)
    twice_near = Add (near, near)
    band = Add (block, twice_near)
    columns = Range (zero, band, one)
    columns_from_query = Sub (columns, query_column)
    distances = Sub (columns_from_query, near)
    not_before = Max (distances, negative_reach)
    clipped = Min (not_before, reach)
    distance_numbers = Add (clipped, reach)
    band_rows = Gather <axis = 0> (narrow_rows, distance_numbers)
    last_column = Constant <value_ints = [-1]> ()
    first_row = Gather <axis = 0> (row_of_distance, zero_1d)
    last_row = Gather <axis = 0> (row_of_distance, last_column)
    block_and_near_1d = Add (block_1d, near_1d)
"""

# A step is a head of a text, a step in it a block of queries. The mask is in the products of the keys, so that it is
# added once a head.
_SCAN = """
    query_blocks = Reshape (scaled_query, blocks_shape)
    keys_shape = Concat <axis = 0> (any_number, tokens_1d, head_dim_1d)
    head_keys = Reshape (own_key, keys_shape)
    head_values = Reshape (own_value, keys_shape)
    scanned = Scan <num_scan_inputs = 5, body = attend_head (
        int64 text, int64 head, float[num_blocks, block, head_dim] queries,
        float[tokens, head_dim] head_key, float[tokens, head_dim] head_value
    ) => (float[padded, head_dim] head_rows) {
        text_bias = Gather <axis = 0> (key_bias, text)
        head_position_keys = Gather <axis = 0> (own_position_keys, head)
        head_position_queries = Gather <axis = 0> (scaled_position_queries, head)
        of_keys = Gemm <transB = 1> (head_position_queries, head_key, text_bias)
        before_of_keys = Gather <axis = 0> (of_keys, first_row)
        behind_of_keys = Gather <axis = 0> (of_keys, last_row)
        block_rows = Scan <num_scan_inputs = 2, body = attend (
            int64 first_query, float[block, head_dim] block_query
        ) => (float[block, head_dim] sums) {
            first_1d = Unsqueeze (first_query, zero_1d)
            band_begin_1d = Sub (first_1d, near_1d)
            band_end_1d = Add (first_1d, block_and_near_1d)
            from_1d = Max (band_begin_1d, zero_1d)
            to_1d = Min (band_end_1d, tokens_1d)
            from_column_1d = Sub (from_1d, band_begin_1d)
            to_column_1d = Sub (to_1d, band_begin_1d)
            rows_here = Slice (band_rows, from_column_1d, to_column_1d, one_1d)
            of_queries = Gemm <transB = 1> (block_query, head_position_keys)
            to_positions = GatherElements <axis = 1> (of_queries, rows_here)
            of_keys_here = Slice (of_keys, from_1d, to_1d, one_1d)
            from_positions = GatherElements <axis = 0> (of_keys_here, rows_here)
            here = Add (to_positions, from_positions)
            before_of_queries = Gather <axis = 1> (of_queries, first_row)
            keys_before = Slice (before_of_keys, zero_1d, from_1d, one_1d)
            before = Add (before_of_queries, keys_before)
            behind_of_queries = Gather <axis = 1> (of_queries, last_row)
            keys_behind = Slice (behind_of_keys, to_1d, tokens_1d, one_1d)
            behind = Add (behind_of_queries, keys_behind)
            bias = Concat <axis = 1> (before, here, behind)
            scores = Gemm <transB = 1> (block_query, head_key, bias)
            weights = Softmax <axis = -1> (scores)
            sums = Gemm (weights, head_value)
        }> (first_queries, queries)
        head_rows = Reshape (block_rows, rows_shape)
    }> (step_texts, step_heads, query_blocks, head_keys, head_values)
"""
