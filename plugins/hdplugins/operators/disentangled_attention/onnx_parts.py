"""What both orders of disentangled attention are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["blocks"]

from hdplugins.operators.query_blocks import blocks_from_start


def blocks(*, is_fixed: bool) -> str:
    """Text of :func:`hdplugins.operators.query_blocks.blocks_from_start`, and of the terms by distance.

    It also makes `scaled_position_queries`, of `own_position_queries`; `narrow_rows`, which take half the memory of
    `row_of_distance`; and `query_column`, [block, 1].

    Args:
        is_fixed: whether blocks of shorter texts are as large; else they are as large as the text.
    """
    return blocks_from_start(is_fixed=is_fixed) + _TERMS


_TERMS = """
    reach = Constant <value_int: int = @reach> ()
    negative_reach = Neg (reach)
    narrow_rows = Cast <to = 6> (row_of_distance)
    queries_of_block = Range (zero, block, one)
    query_column = Unsqueeze (queries_of_block, one_1d)
    scaled_position_queries = Mul (own_position_queries, typed_scale)
"""
