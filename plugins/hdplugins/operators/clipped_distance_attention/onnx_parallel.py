"""A block of queries of all heads of all texts after another, as ONNX text."""

from __future__ import annotations

__all__ = ["parallel"]

from hdplugins.operators.clipped_distance_attention.onnx_parts import blocks, shifted_to_distances, shifted_to_keys
from hdplugins.operators.query_blocks import ROWS_OF_BLOCKS, STEPS_OF_BLOCKS


def parallel(*, values: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        values: whether there are `values_by_distance`.
    """
    text = "own_query = Identity (query)\nown_value = Identity (value)\n"
    text += blocks(is_fixed=True, values=values) + STEPS_OF_BLOCKS + _STEPS + (_VALUE_STEPS if values else "")
    text += _SCAN.format(
        to_keys=shifted_to_keys("number_columns", "number_band", axes=4),
        sums=_VALUES.format(to_distances=shifted_to_distances("band_weights", "shares", axes=4))
        if values
        else "sums = MatMul (typed_weights, value)",
    )
    return text + ROWS_OF_BLOCKS


_STEPS = """
    rows_of_block = Range (zero, block, one)
    last_from_band = Add (tokens, reach)
    keys_from_band = Range (reach, last_from_band, one)
    last_band_column_1d = Sub (band_1d, one_1d)
"""

_VALUE_STEPS = """
    columns_of_band = Range (zero, band, one)
    last_near_row_1d = Add (band_1d, one_1d)
    reach_and_band_1d = Add (reach_1d, band_1d)
    around_weights = Concat <axis = 0> (
        zero_1d, zero_1d, zero_1d, reach_1d, zero_1d, zero_1d, zero_1d, reach_and_band_1d
    )
"""

_VALUES = """
    near_columns = Add (columns, one_1d)
    near_not_below = Max (near_columns, zero_1d)
    rows_of_keys = Min (near_not_below, last_near_row_1d)
    far_rows = Gather <axis = 0> (near_rows, rows_of_keys)
    block_value = Add (value, far_rows)
    key_sums = MatMul (typed_weights, block_value)
    weights_and_more = Pad (typed_weights, around_weights)
    band_keys = Add (columns_of_band, first_query)
    band_weights = Gather <axis = 3> (weights_and_more, band_keys)
    {to_distances}
    distance_sums = MatMul (shares, value_rows)
    sums = Add (key_sums, distance_sums)
"""

# TensorRT's parser refuses a Scan without a state, so the block's number is one. TensorRT-RTX 1.7.1 builds no Slice and
# no Pad whose bounds differ from step to step, so keys and rows are gathered. Blocks are of a fixed size: where it is
# that of a shorter text, it plans far more memory.
_SCAN = """
    all_blocks, scanned_rows = Scan <num_scan_inputs = 1, body = attend (int64 number, int64 first_query) => (
        int64 next_number, float[batch, heads, block, head_dim] wide_sums
    ) {{
        next_number = Add (number, one)
        block_query = Gather <axis = 0> (query_blocks, number)
        rows_in_text = Add (rows_of_block, first_query)
        number_rows = Min (rows_in_text, last_number_row_1d)
        own_numbers = Gather <axis = 2> (scores_by_distance, number_rows)
        float_numbers = Cast <to = 1> (own_numbers)
        number_columns = Gather <axis = 3> (float_numbers, rows_of_width)
        {to_keys}
        columns = Sub (keys_from_band, first_query)
        columns_not_below = Max (columns, zero_1d)
        columns_of_keys = Min (columns_not_below, last_band_column_1d)
        number_scores = Gather <axis = 3> (number_band, columns_of_keys)
        typed_products = MatMul (block_query, turned_key)
        products = Cast <to = 1> (typed_products)
        all_scores = Add (products, number_scores)
        scores = Add (all_scores, key_bias_rows)
        weights = Softmax <axis = -1> (scores)
        typed_weights = CastLike (weights, value)
        {sums}
        wide_sums = Cast <to = 1> (sums)
    }}> (zero, first_queries)
"""
