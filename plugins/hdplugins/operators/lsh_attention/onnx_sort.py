"""A stable sort by counting, as ONNX text: linear in memory, of operators that every runtime has at any length."""

from __future__ import annotations

__all__ = ["counting_sort"]

import math

_BLOCK = 64
"""Numbers that are compared with each other."""


def counting_sort(most: int) -> str:
    """Text that makes `rank` and `order` of `sorting`, all int64, [rows, padded].

    `rank` is the place of each number among the sorted ones of its row, equal ones in their order, and `order` the
    inverse. A number's rank is how many are smaller, how many equal ones earlier blocks have, and how many stand
    before it in its own block. What is counted per number is counted per pair of its two digits, so that a block's
    counts are one product of matrices. Counts are exact in float32 up to 2 ** 24 numbers.

    Args:
        most: the largest number; the smallest is 0.
    """
    return _COUNTING_SORT.format(block=_BLOCK, most=most, base=math.isqrt(most) + 1)


_COUNTING_SORT = """
    sort_block = Constant <value_int = {block}> ()
    most = Constant <value_int = {most}> ()
    base = Constant <value_int = {base}> ()
    last_place = Sub (padded, one)
    last_sort_block = Div (last_place, sort_block)
    sort_blocks = Add (last_sort_block, one)
    sorted_numbers = Mul (sort_blocks, sort_block)
    fill = Sub (sorted_numbers, padded)
    fill_1d = Unsqueeze (fill, zero_1d)
    fill_before = Constant <value_ints = [0, 0, 0]> ()
    filling = Concat <axis = 0> (fill_before, fill_1d)
    filled = Pad (sorting, filling, most)
    blocks_shape = Constant <value_ints = [0, -1, {block}]> ()
    numbers = Reshape (filled, blocks_shape)
    high = Div (numbers, base)
    high_part = Mul (high, base)
    low = Sub (numbers, high_part)
    digits = Range (zero, base, one)
    high_column = Unsqueeze (high, last_axis)
    is_high = Equal (high_column, digits)
    high_digits = Cast <to = 1> (is_high)
    low_column = Unsqueeze (low, last_axis)
    is_low = Equal (low_column, digits)
    low_digits = Cast <to = 1> (is_low)
    turned_digits = Transpose <perm = [0, 1, 3, 2]> (high_digits)
    digit_counts = MatMul (turned_digits, low_digits)
    counts_shape = Constant <value_ints = [0, 0, -1]> ()
    counts = Reshape (digit_counts, counts_shape)
    in_earlier_blocks = CumSum <exclusive = 1> (counts, one)
    totals = ReduceSum <keepdims = 1> (counts, one_1d)
    two = Constant <value_int = 2> ()
    smaller = CumSum <exclusive = 1> (totals, two)
    first_ranks = Add (in_earlier_blocks, smaller)
    first_rank = GatherElements <axis = 2> (first_ranks, numbers)
    number_column = Unsqueeze (numbers, last_axis)
    number_row = Unsqueeze (numbers, two_1d)
    is_equal = Equal (number_column, number_row)
    block_range = Range (zero, sort_block, one)
    range_column = Unsqueeze (block_range, one_1d)
    is_earlier = Less (block_range, range_column)
    is_before = And (is_equal, is_earlier)
    before_numbers = Cast <to = 1> (is_before)
    in_own_block = ReduceSum <keepdims = 0> (before_numbers, last_axis)
    block_ranks = Add (first_rank, in_own_block)
    whole_ranks = Cast <to = 7> (block_ranks)
    ranks_shape = Constant <value_ints = [0, -1]> ()
    filled_rank = Reshape (whole_ranks, ranks_shape)
    rank = Slice (filled_rank, zero_1d, padded_1d, one_1d)
    sorting_shape = Shape (sorting)
    sorting_places = Expand (places, sorting_shape)
    order = ScatterElements <axis = 1> (sorting_places, rank, sorting_places)
"""
