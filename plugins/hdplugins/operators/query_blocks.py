"""What function bodies that run blocks of queries share, as ONNX text."""

from __future__ import annotations

__all__ = ["ROWS_OF_BLOCKS", "ROWS_OF_HEADS", "STEPS_OF_BLOCKS", "STEPS_OF_HEADS", "blocks_from_start", "query_blocks"]

_BLOCK_TOKENS = 128
"""Queries of a block: at 1024 keys their scores stay in a CPU's cache. With 64 to 256 the time hardly differs."""


def query_blocks(*, is_fixed: bool) -> str:
    """Text that counts the blocks of `own_query`, [batch, heads, tokens, head_dim].

    It makes constants; the sizes of `own_query`; `block`, `num_blocks` and `padded`, the tokens of all blocks;
    `missing_1d`, how many of them are no tokens; and `block_numbers`, [blocks].

    Args:
        is_fixed: whether blocks of shorter texts are as large; else they are as large as the text.
    """
    block = "Identity (block_tokens)" if is_fixed else "Min (block_tokens, tokens)"
    return _BLOCKS.format(most=_BLOCK_TOKENS, block=block)


def blocks_from_start(*, is_fixed: bool) -> str:
    """As :func:`query_blocks`, for blocks that begin with the text; the last one is filled up behind the text.

    It also makes `scaled_query`, [batch, heads, padded, head_dim]; `first_queries`, [blocks]; `key_bias`, [batch,
    tokens], of `key_mask`; and `is_text_of_rows`, [batch, 1, 1, 1], false for a text of nothing but padding.

    Args:
        is_fixed: likewise.
    """
    return query_blocks(is_fixed=is_fixed) + _FROM_START


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
    typed_scale = CastLike (scale, own_query)
"""

_FROM_START = """
    first_queries = Mul (block_numbers, block)
    behind_tokens = Concat <axis = 0> (
        zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, zero_1d, missing_1d, zero_1d
    )
    padded_query = Pad (own_query, behind_tokens)
    scaled_query = Mul (padded_query, typed_scale)
    key_bias = Where (key_mask, seen_score, masked_score)
    float_mask = Cast <to = 1> (key_mask)
    any_real = ReduceMax <keepdims = 1> (float_mask, one_1d)
    is_text = Cast <to = 9> (any_real)
    text_axes = Constant <value_ints = [2, 3]> ()
    is_text_of_rows = Unsqueeze (is_text, text_axes)
"""

STEPS_OF_HEADS = """
    num_steps = Mul (batch, num_heads)
    step_numbers = Range (zero, num_steps, one)
    step_texts = Div (step_numbers, num_heads)
    first_steps = Mul (step_texts, num_heads)
    step_heads = Sub (step_numbers, first_steps)
    blocks_shape = Concat <axis = 0> (any_number, num_blocks_1d, block_1d, head_dim_1d)
    rows_shape = Concat <axis = 0> (padded_1d, head_dim_1d)
    text_heads_shape = Concat <axis = 0> (batch_1d, heads_1d, padded_1d, head_dim_1d)
"""
"""Steps of a Scan, each a head of a text, and the shapes of its blocks; after :func:`query_blocks`."""

STEPS_OF_BLOCKS = """
    blocks_shape = Concat <axis = 0> (zero_1d, zero_1d, num_blocks_1d, block_1d, head_dim_1d)
    query_by_text = Reshape (scaled_query, blocks_shape)
    query_blocks = Transpose <perm = [2, 0, 1, 3, 4]> (query_by_text)
    turned_key = Transpose <perm = [0, 1, 3, 2]> (key)
    key_bias_axes = Constant <value_ints = [1, 2]> ()
    key_bias_rows = Unsqueeze (key_bias, key_bias_axes)
"""
"""What steps of a Scan take, each a block of all heads of all texts; after :func:`blocks_from_start`."""

ROWS_OF_HEADS = """
    rows_and_more = Reshape (scanned, text_heads_shape)
    rows_of_text = Slice (rows_and_more, zero_1d, tokens_1d, two_1d)
    own_rows = Where (is_text_of_rows, rows_of_text, seen_score)
    rows = CastLike (own_rows, query)
"""
"""Makes `rows` like `query` of `scanned`, [steps, padded, head_dim]; after :func:`blocks_from_start`.

Where, not a product: the sums of padding may be anything.
"""

ROWS_OF_BLOCKS = """
    turned_rows = Transpose <perm = [1, 2, 0, 3, 4]> (scanned_rows)
    all_rows_shape = Concat <axis = 0> (batch_1d, heads_1d, padded_1d, head_dim_1d)
    float_rows = Reshape (turned_rows, all_rows_shape)
    padded_rows = CastLike (float_rows, query)
    rows_of_text = Slice (padded_rows, zero_1d, tokens_1d, two_1d)
    nothing = CastLike (seen_score, query)
    attended = Where (is_text_of_rows, rows_of_text, nothing)
"""
"""Makes `attended` like `query` of `scanned_rows`, [blocks, batch, heads, block, head_dim]; likewise."""
