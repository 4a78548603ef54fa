"""What both orders of attention by clipped distance are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["blocks", "shifted_to_distances", "shifted_to_keys"]

_BLOCK_TOKENS = 128
"""Queries of a block: at 1024 keys their scores stay in a CPU's cache."""


def blocks(*, is_fixed: bool, values: bool) -> str:
    """Text that cuts `own_query`, [batch, heads, tokens, head_dim], into blocks that begin with the text.

    The last block is filled up behind the text. The band of a block are the keys that one of its queries sees at a
    distance of at most the reach, and those between them: the first key of the band is at -reach or farther for every
    query, the last one at the reach or farther, so keys before and behind the band have the terms of its edges. By
    distance, a block has `width` columns, which are those from the last query to the first key of the band, and on to
    the last key from the first query.

    It makes `scaled_query`, [batch, heads, padded, head_dim]; `first_queries`, [blocks]; `key_bias`, [batch, tokens];
    `rows_of_width`, [width], the rows of a table by distance; and what the functions below read. With values, it makes
    of them, in the dtype of `own_value`, `value_rows`, [width, head_dim], and `near_rows`, [1 + band + 1, head_dim],
    which are 0 in the band.

    Args:
        is_fixed: whether blocks of shorter texts are as large; else they are as large as the text.
        values: whether there are `values_by_distance`.
    """
    block = "Identity (block_tokens)" if is_fixed else "Min (block_tokens, tokens)"
    return _BLOCKS.format(most=_BLOCK_TOKENS, block=block) + (_VALUE_ROWS if values else "")


def shifted_to_keys(source: str, result: str, *, axes: int) -> str:
    """Text that makes `result`, [..., block, band], of `source`, [..., block, width].

    Row r of the result begins in column block - 1 - r: flattened, each row begins one number less than a row after the
    one before it.

    Args:
        source: name of what is by distance.
        result: name of the same by key.
        axes: how many axes both have.
    """
    return _TO_KEYS.format(source=source, result=result, **_axes(axes))


def shifted_to_distances(source: str, result: str, *, axes: int) -> str:
    """Text that makes `result`, [..., block, width], of `source`, [..., block, band]; where no key is, it is 0.

    Args:
        source: name of what is by key.
        result: name of the same by distance.
        axes: how many axes both have.
    """
    return _TO_DISTANCES.format(source=source, result=result, **_axes(axes))


def _axes(axes: int) -> dict[str, object]:
    return {"flat_shape": [*([0] * (axes - 2)), -1], "zeros": "zero_1d, " * (axes - 2)}


_BLOCKS = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    two_1d = Constant <value_ints = [2]> ()
    any_number = Constant <value_ints = [-1]> ()
    seen_score = Constant <value_float = 0.0> ()
    masked_score = Constant <value_float = -1.0e30> ()
    scale = Constant <value_float: float = @scale> ()
    reach = Constant <value_int: int = @reach> ()
    reach_1d = Unsqueeze (reach, zero_1d)
    twice_reach_1d = Add (reach_1d, reach_1d)
    batch_1d = Shape <end = 1> (own_query)
    batch = Squeeze (batch_1d)
    heads_1d = Shape <start = 1, end = 2> (own_query)
    num_heads = Squeeze (heads_1d)
    tokens_1d = Shape <start = 2, end = 3> (own_query)
    tokens = Squeeze (tokens_1d)
    head_dim_1d = Shape <start = 3, end = 4> (own_query)
    number_rows_1d = Shape <start = 2, end = 3> (scores_by_distance)
    last_number_row_1d = Sub (number_rows_1d, one_1d)
    block_tokens = Constant <value_int = {most}> ()
    block = {block}
    block_1d = Unsqueeze (block, zero_1d)
    last_token = Sub (tokens, one)
    last_block = Div (last_token, block)
    num_blocks = Add (last_block, one)
    num_blocks_1d = Unsqueeze (num_blocks, zero_1d)
    padded = Mul (num_blocks, block)
    padded_1d = Unsqueeze (padded, zero_1d)
    missing_1d = Sub (padded_1d, tokens_1d)
    block_numbers = Range (zero, num_blocks, one)
    first_queries = Mul (block_numbers, block)
    behind_tokens = Concat <axis = 0> (
        zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, missing_1d, zero_1d
    )
    padded_query = Pad (own_query, behind_tokens)
    typed_scale = CastLike (scale, own_query)
    scaled_query = Mul (padded_query, typed_scale)
    key_bias = Where (key_mask, seen_score, masked_score)
    float_mask = Cast <to = 1> (key_mask)
    any_real = ReduceMax <keepdims = 1> (float_mask, one_1d)
    is_text = Cast <to = 9> (any_real)
    text_axes = Constant <value_ints = [2, 3]> ()
    is_text_of_rows = Unsqueeze (is_text, text_axes)
    band_1d = Add (block_1d, twice_reach_1d)
    band = Squeeze (band_1d)
    width_1d = Add (band_1d, block_1d)
    width = Squeeze (width_1d)
    last_column = Constant <value_ints = [-1]> ()
    shift_1d = Sub (block_1d, one_1d)
    shorter_1d = Sub (width_1d, one_1d)
    kept_1d = Mul (block_1d, shorter_1d)
    kept_end_1d = Add (kept_1d, shift_1d)
    columns_of_width = Range (zero, width, one)
    shifted_columns = Sub (columns_of_width, shift_1d)
    not_below_columns = Max (shifted_columns, zero_1d)
    rows_of_width = Min (not_below_columns, twice_reach_1d)
"""

_VALUE_ROWS = """
    typed_value_rows = CastLike (values_by_distance, own_value)
    value_rows = Gather <axis = 0> (typed_value_rows, rows_of_width)
    first_value_row = Gather <axis = 0> (typed_value_rows, zero_1d)
    last_value_row = Gather <axis = 0> (typed_value_rows, twice_reach_1d)
    band_rows_shape = Concat <axis = 0> (band_1d, head_dim_1d)
    typed_nothing = CastLike (seen_score, own_value)
    no_rows = Expand (typed_nothing, band_rows_shape)
    near_rows = Concat <axis = 0> (first_value_row, no_rows, last_value_row)
"""

_TO_KEYS = """
    {source}_flat_shape = Constant <value_ints = {flat_shape}> ()
    {source}_flat = Reshape ({source}, {source}_flat_shape)
    {source}_kept = Slice ({source}_flat, shift_1d, kept_end_1d, last_column)
    {source}_rows_shape = Concat <axis = 0> ({zeros}block_1d, shorter_1d)
    {source}_rows = Reshape ({source}_kept, {source}_rows_shape)
    {result} = Slice ({source}_rows, zero_1d, band_1d, last_column)
"""

_TO_DISTANCES = """
    {source}_behind = Concat <axis = 0> ({zeros}zero_1d, zero_1d, {zeros}zero_1d, shift_1d)
    {source}_rows = Pad ({source}, {source}_behind)
    {source}_flat_shape = Constant <value_ints = {flat_shape}> ()
    {source}_flat = Reshape ({source}_rows, {source}_flat_shape)
    {source}_around = Concat <axis = 0> ({zeros}shift_1d, {zeros}one_1d)
    {source}_all = Pad ({source}_flat, {source}_around)
    {source}_shape = Concat <axis = 0> ({zeros}block_1d, width_1d)
    {result} = Reshape ({source}_all, {source}_shape)
"""
