"""What both orders of disentangled attention are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["blocks"]

_BLOCK_TOKENS = 128
"""Queries of a block: at 1024 keys their scores stay in a CPU's cache."""


def blocks(*, is_fixed: bool) -> str:
    """Text that cuts `own_query`, [batch, heads, tokens, head_dim], into blocks that begin with the text.

    The last block is filled up behind the text. It makes `scaled_query`, [batch, heads, padded, head_dim];
    `first_queries`, [blocks]; `key_bias`, [batch, tokens]; `scaled_position_queries`, of `own_position_queries`;
    `narrow_rows`, which take half the memory of `row_of_distance`; and the sizes that are read around it.

    Args:
        is_fixed: whether blocks of shorter texts are as large; else they are as large as the text.
    """
    block = "Identity (block_tokens)" if is_fixed else "Min (block_tokens, tokens)"
    return _BLOCKS.format(most=_BLOCK_TOKENS, block=block)


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
    negative_reach = Neg (reach)
    narrow_rows = Cast <to = 6> (row_of_distance)
    batch_1d = Shape <end = 1> (own_query)
    batch = Squeeze (batch_1d)
    heads_1d = Shape <start = 1, end = 2> (own_query)
    num_heads = Squeeze (heads_1d)
    tokens_1d = Shape <start = 2, end = 3> (own_query)
    tokens = Squeeze (tokens_1d)
    head_dim_1d = Shape <start = 3, end = 4> (own_query)
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
    queries_of_block = Range (zero, block, one)
    query_column = Unsqueeze (queries_of_block, one_1d)
    behind_tokens = Concat <axis = 0> (
        zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, missing_1d, zero_1d
    )
    padded_query = Pad (own_query, behind_tokens)
    typed_scale = CastLike (scale, own_query)
    scaled_query = Mul (padded_query, typed_scale)
    scaled_position_queries = Mul (own_position_queries, typed_scale)
    key_bias = Where (key_mask, seen_score, masked_score)
    float_mask = Cast <to = 1> (key_mask)
    any_real = ReduceMax <keepdims = 1> (float_mask, one_1d)
    is_text = Cast <to = 9> (any_real)
    text_axes = Constant <value_ints = [2, 3]> ()
    is_text_of_rows = Unsqueeze (is_text, text_axes)
"""
