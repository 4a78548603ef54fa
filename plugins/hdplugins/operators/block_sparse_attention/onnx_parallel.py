"""All blocks in one batch of products, as ONNX text."""

from __future__ import annotations

__all__ = ["parallel"]

from hdplugins.operators.block_sparse_attention.onnx_parts import Parts, listing, shifts, sparse_attention
from hdplugins.operators.onnx_text import attention


def parallel(parts: Parts) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim]."""
    sparse = _parallel_states(parts, "key") + _parallel_states(parts, "value") + _BLOCK_QUERY
    sparse += sparse_attention(parts, "key_span", "value_span", "bias", "block_sums", axes=5)
    sparse += _parallel_global_rows(parts)
    if not parts.dense:
        return sparse + "joined = Identity (sparse)\n" + _DROP_PADDING
    dense = attention("query", "head_key", "head_value", "head_bias", "short_rows", axes=4)
    return _DENSE_OR_SPARSE.format(sparse=sparse, dense=dense) + _DROP_PADDING


def _parallel_states(parts: Parts, state: str) -> str:
    """Text that makes `<state>_span`, [batch, heads, blocks, span, head_dim]."""
    text = _STATE_BLOCKS.format(state=state, window=max(parts.window, 0))
    if parts.front:
        text += _FRONT_STATE.format(state=state)
    if parts.last:
        text += _LAST_STATE.format(state=state) + _EXPAND_LAST_STATE.format(state=state)
    if parts.window >= 0:
        text += shifts(f"wide_{state}", f"near_{state}", parts.window, axis=2)
    if parts.listed:
        text += _LISTED_STATE.format(state=state)
    spans = [*parts.spans, *(["listed"] if parts.listed else [])]
    return text + f"{state}_span = Concat <axis = 3> ({listing('{}_' + state, spans)})\n"


def _parallel_global_rows(parts: Parts) -> str:
    """Text that makes `sparse`, [batch, heads, tokens, head_dim]: the rows of global blocks see all keys."""
    text = "all_bias = Unsqueeze (token_bias, both_axes)\n"
    rows = []
    if parts.first:
        text += _FIRST_QUERIES
        rows.append("first_queries")
    if parts.last:
        text += _LAST_STATE.format(state="query") + "last_queries = Squeeze (last_query_block, two_1d)\n"
        rows.append("last_queries")
    if rows:
        text += f"global_queries = Concat <axis = 2> ({', '.join(rows)})\n"
        text += attention("global_queries", "key", "value", "all_bias", "global_sums", axes=4)
    if parts.first:
        text += _SPLIT_GLOBAL_SUMS
    text += (
        _PLACE_LAST.format(last="last_rows" if parts.first else "global_sums")
        if parts.last
        else "placed = Identity (block_sums)\n"
    )
    text += _UNCUT
    return text + (_PLACE_FIRST if parts.first else "rows_and_more = Identity (placed_rows)\n") + _CUT


# The parallel order. `wide_<state>` has as many empty blocks on both sides as a window reaches.
_STATE_BLOCKS = """
    {state}_dim = Shape <start = 3, end = 4> ({state})
    {state}_reach = Constant <value_ints = [{window}]> ()
    {state}_before = Mul ({state}_reach, block_1d)
    {state}_behind = Add ({state}_before, missing_1d)
    {state}_padding = Concat <axis = 0> (
        zero_1d, zero_1d, {state}_before, zero_1d, zero_1d, zero_1d, {state}_behind, zero_1d
    )
    padded_{state} = Pad ({state}, {state}_padding)
    {state}_blocks_shape = Concat <axis = 0> (zero_1d, zero_1d, any_number, block_1d, {state}_dim)
    wide_{state} = Reshape (padded_{state}, {state}_blocks_shape)
    {state}_end = Add ({state}_reach, blocks_1d)
    {state}_blocks = Slice (wide_{state}, {state}_reach, {state}_end, two_1d)
"""

_BLOCK_QUERY = _STATE_BLOCKS.format(state="query", window=0) + "block_query = Identity (query_blocks)\n"

_FRONT_STATE = """
    front_{state}_blocks = Slice ({state}_blocks, zero_1d, front_end, two_1d)
    front_{state}_shape = Concat <axis = 0> (zero_1d, zero_1d, one_1d, any_number, {state}_dim)
    front_{state}_row = Reshape (front_{state}_blocks, front_{state}_shape)
    front_{state}_times = Concat <axis = 0> (one_1d, one_1d, blocks_1d, one_1d, one_1d)
    front_{state} = Expand (front_{state}_row, front_{state}_times)
"""

_LAST_STATE = """
    last_{state}_axes = Constant <value_ints = [1, 2, 3, 4]> ()
    last_{state}_cell = Unsqueeze (last_block_index, last_{state}_axes)
    {state}_heads = Shape <start = 1, end = 2> ({state})
    last_{state}_shape = Concat <axis = 0> (one_1d, {state}_heads, one_1d, block_1d, {state}_dim)
    last_{state}_index = Expand (last_{state}_cell, last_{state}_shape)
    last_{state}_block = GatherElements <axis = 2> ({state}_blocks, last_{state}_index)
"""

_EXPAND_LAST_STATE = """
    last_{state}_times = Concat <axis = 0> (one_1d, one_1d, blocks_1d, one_1d, one_1d)
    last_{state} = Expand (last_{state}_block, last_{state}_times)
"""

# Blocks of all heads are numbered through, for heads may have rows of their own.
_LISTED_STATE = """
    {state}_num_heads_1d = Shape <start = 1, end = 2> ({state})
    {state}_num_heads = Squeeze ({state}_num_heads_1d)
    {state}_head_numbers = Range (zero, {state}_num_heads, one)
    {state}_head_starts = Mul ({state}_head_numbers, blocks)
    {state}_head_column = Unsqueeze ({state}_head_starts, both_axes)
    {state}_head_index = Add ({state}_head_column, listed_index)
    {state}_rows_shape = Concat <axis = 0> (zero_1d, any_number, block_1d, {state}_dim)
    {state}_block_rows = Reshape ({state}_blocks, {state}_rows_shape)
    listed_{state}_blocks = Gather <axis = 1> ({state}_block_rows, {state}_head_index)
    listed_{state}_start = Constant <value_ints = [0, 0, 0, -1]> ()
    listed_{state}_shape = Concat <axis = 0> (listed_{state}_start, {state}_dim)
    listed_{state} = Reshape (listed_{state}_blocks, listed_{state}_shape)
"""

_FIRST_QUERIES = """
    first_tokens = Mul (first_global, block)
    first_end = Unsqueeze (first_tokens, zero_1d)
    first_queries = Slice (padded_query, zero_1d, first_end, two_1d)
"""

_SPLIT_GLOBAL_SUMS = """
    first_rows = Shape <start = 2, end = 3> (first_queries)
    first_sums = Slice (global_sums, zero_1d, first_rows, two_1d)
    global_end = Shape <start = 2, end = 3> (global_sums)
    last_rows = Slice (global_sums, first_rows, global_end, two_1d)
"""

_PLACE_LAST = """
    place_axes = Constant <value_ints = [1, 3, 4]> ()
    last_place_mask = Unsqueeze (is_last, place_axes)
    last_sums = Unsqueeze ({last}, two_1d)
    placed = Where (last_place_mask, last_sums, block_sums)
"""

_UNCUT = """
    uncut = Constant <value_ints = [0, 0, -1]> ()
    uncut_shape = Concat <axis = 0> (uncut, query_dim)
    placed_rows = Reshape (placed, uncut_shape)
"""

_PLACE_FIRST = """
    whole_1d = Unsqueeze (whole, zero_1d)
    other_rows = Slice (placed_rows, first_rows, whole_1d, two_1d)
    rows_and_more = Concat <axis = 2> (first_sums, other_rows)
"""

_CUT = """
    sparse = Slice (rows_and_more, zero_1d, tokens_1d, two_1d)
"""

# All queries meet the keys of the longest short text: with as few queries, TensorRT-RTX 1.7.1 fails to build.
_DENSE_OR_SPARSE = """
    no_value = CastLike (seen_score, query)
    sparse_rows = If <
        then_branch = all_are_short () => (no_rows) {{
            query_shape = Shape (query)
            no_rows = Expand (no_value, query_shape)
        }},
        else_branch = some_are_long () => (sparse) {{ {sparse} }}
    > (all_short)
    joined = If <
        then_branch = some_are_short () => (short_or_long) {{
            dense_end = Unsqueeze (dense_tokens, zero_1d)
            head_key = Slice (key, zero_1d, dense_end, two_1d)
            head_value = Slice (value, zero_1d, dense_end, two_1d)
            head_token_bias = Slice (token_bias, zero_1d, dense_end, one_1d)
            head_bias = Unsqueeze (head_token_bias, both_axes)
            {dense}
            short_axes = Constant <value_ints = [1, 2, 3]> ()
            short_texts = Unsqueeze (is_short, short_axes)
            short_or_long = Where (short_texts, short_rows, sparse_rows)
        }},
        else_branch = none_is_short () => (all_long) {{ all_long = Identity (sparse_rows) }}
    > (any_short)
"""

# Only padding needs a separate rule.
_DROP_PADDING = """
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    zero_value = Constant <value_float = 0.0> ()
    nothing = CastLike (zero_value, query)
    attended = Where (real_rows, joined, nothing)
"""
