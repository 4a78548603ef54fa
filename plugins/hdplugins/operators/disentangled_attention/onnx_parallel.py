"""A block of queries of all heads of all texts after another, as ONNX text."""

from __future__ import annotations

__all__ = ["PARALLEL"]

from hdplugins.operators.disentangled_attention.onnx_parts import blocks
from hdplugins.operators.query_blocks import ROWS_OF_BLOCKS, STEPS_OF_BLOCKS

# TensorRT's parser refuses a Scan without a state, so the block's number is one. Blocks are of a fixed size: where it
# is that of a shorter text, TensorRT-RTX plans far more memory.
PARALLEL = f"""
    own_query = Identity (query)
    own_position_queries = Identity (position_queries)
    {blocks(is_fixed=True)}
    {STEPS_OF_BLOCKS}
    turned_position_keys = Transpose <perm = [0, 2, 1]> (position_keys)
    of_keys = MatMul (scaled_position_queries, turned_key)
    key_places = Range (zero, tokens, one)
    distances_of_first = Sub (key_places, query_column)
    gathered_shape = Concat <axis = 0> (batch_1d, heads_1d, block_1d, tokens_1d)
    all_blocks, scanned_rows = Scan <num_scan_inputs = 1, body = attend (int64 number, int64 first_query) => (
        int64 next_number, float[batch, heads, block, head_dim] wide_sums
    ) {{
        next_number = Add (number, one)
        block_query = Gather <axis = 0> (query_blocks, number)
        distances = Sub (distances_of_first, first_query)
        not_before = Max (distances, negative_reach)
        clipped = Min (not_before, reach)
        distance_numbers = Add (clipped, reach)
        distance_rows = Gather <axis = 0> (narrow_rows, distance_numbers)
        gathered_rows = Expand (distance_rows, gathered_shape)
        of_queries = MatMul (block_query, turned_position_keys)
        typed_to_positions = GatherElements <axis = 3> (of_queries, gathered_rows)
        to_positions = Cast <to = 1> (typed_to_positions)
        typed_from_positions = GatherElements <axis = 2> (of_keys, gathered_rows)
        from_positions = Cast <to = 1> (typed_from_positions)
        position_scores = Add (to_positions, from_positions)
        typed_products = MatMul (block_query, turned_key)
        products = Cast <to = 1> (typed_products)
        all_scores = Add (products, position_scores)
        scores = Add (all_scores, key_bias_rows)
        weights = Softmax <axis = -1> (scores)
        typed_weights = CastLike (weights, value)
        sums = MatMul (typed_weights, value)
        wide_sums = Cast <to = 1> (sums)
    }}> (zero, first_queries)
    {ROWS_OF_BLOCKS}
"""
