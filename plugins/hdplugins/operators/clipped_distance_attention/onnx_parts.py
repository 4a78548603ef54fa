"""What both orders of attention by clipped distance are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["blocks", "shifted_to_distances", "shifted_to_keys"]

from hdplugins.operators.query_blocks import blocks_from_start


def blocks(*, is_fixed: bool, values: bool) -> str:
    """Text of :func:`hdplugins.operators.query_blocks.blocks_from_start`, and of the blocks' bands.

    The band of a block are the keys that one of its queries sees at a
    distance of at most the reach, and those between them: the first key of the band is at -reach or farther for every
    query, the last one at the reach or farther, so keys before and behind the band have the terms of its edges. By
    distance, a block has `width` columns, which are those from the last query to the first key of the band, and on to
    the last key from the first query.

    It also makes `rows_of_width`, [width], the rows of a table by distance; and what the functions below read. With
    values, it makes of them, in the dtype of `own_value`, `value_rows`, [width, head_dim], and `near_rows`, [1 + band +
    1, head_dim], which are 0 in the band.

    Args:
        is_fixed: whether blocks of shorter texts are as large; else they are as large as the text.
        values: whether there are `values_by_distance`.
    """
    return blocks_from_start(is_fixed=is_fixed) + _BANDS + (_VALUE_ROWS if values else "")


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


_BANDS = """
    reach = Constant <value_int: int = @reach> ()
    reach_1d = Unsqueeze (reach, zero_1d)
    twice_reach_1d = Add (reach_1d, reach_1d)
    number_rows_1d = Shape <start = 2, end = 3> (scores_by_distance)
    last_number_row_1d = Sub (number_rows_1d, one_1d)
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
