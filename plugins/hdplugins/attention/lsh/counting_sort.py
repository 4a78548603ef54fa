"""A stable sort by counting as standard ONNX operators: linear in memory, and every runtime has it at any length."""

from __future__ import annotations

import math

from onnx import TensorProto

from hdplugins.attention.body_maker import Op, Value
from hdplugins.attention.body_parts import wide

_BLOCK = 64
"""The numbers of a block, which are compared with each other."""


def counting_sort(op: Op, numbers: Value, places: Value, padded: Value, *, most: int) -> tuple[Value, Value]:
    """Return the rank of each number among the sorted numbers of its row, and the order, which is the inverse.

    A number's rank is how many numbers are smaller, how many equal ones earlier blocks have, and how many equal ones
    stand before it in its own block. What is counted per number is counted per pair of the number's two digits, so that
    the counts of a block are one product of matrices. Counts are exact in float32 up to 2 ** 24 numbers.

    Args:
        op: appends to the graph.
        numbers: [rows, padded], int64, 0 or more.
        places: [padded], int64, from 0.
        padded: [], int64.
        most: the largest number.

    Returns:
        Two values, [rows, padded], int64. Equal numbers keep their order.
    """
    blocks = op.Add(op.Div(op.Sub(padded, 1), _BLOCK), 1)
    fill_1d = op.Unsqueeze(op.Sub(op.Mul(blocks, _BLOCK), padded), [0])
    filled = op.Pad(numbers, op.Concat([0, 0, 0], fill_1d, axis=0), most)
    in_blocks = op.Reshape(filled, [0, -1, _BLOCK])  # [rows, blocks, block]
    base = math.isqrt(most) + 1
    high = op.Div(in_blocks, base)
    low = op.Sub(in_blocks, op.Mul(high, base))
    high_digits, low_digits = (
        wide(op, op.Equal(op.Unsqueeze(digit, [-1]), list(range(base)))) for digit in (high, low)
    )  # [rows, blocks, block, base]
    digit_counts = op.MatMul(op.Transpose(high_digits, perm=[0, 1, 3, 2]), low_digits)
    counts = op.Reshape(digit_counts, [0, 0, -1])  # [rows, blocks, base * base]
    in_earlier_blocks = op.CumSum(counts, 1, exclusive=1)
    smaller = op.CumSum(op.ReduceSum(counts, [1]), 2, exclusive=1)
    first_rank = op.GatherElements(op.Add(in_earlier_blocks, smaller), in_blocks, axis=2)
    is_equal = op.Equal(op.Unsqueeze(in_blocks, [-1]), op.Unsqueeze(in_blocks, [2]))
    block_range = op.Range(0, _BLOCK, 1)
    is_before = op.And(is_equal, op.Less(block_range, op.Unsqueeze(block_range, [1])))
    in_own_block = op.ReduceSum(wide(op, is_before), [-1], keepdims=0)
    ranks = op.Cast(op.Add(first_rank, in_own_block), to=TensorProto.INT64)
    rank = op.Slice(op.Reshape(ranks, [0, -1]), [0], op.Unsqueeze(padded, [0]), [1])
    row_places = op.Expand(places, op.Shape(numbers))
    return rank, op.ScatterElements(row_places, rank, row_places, axis=1)
