"""The rows of states that block-sparse attention reads and writes in OpenVINO, as ONNX text that reads the mask alone.

Numbers that count tokens are integers: in bfloat16, OpenVINO rounds numbers above 256.
"""

from __future__ import annotations

__all__ = ["block_tables"]

import math
from collections.abc import Mapping
from typing import Any

from hdplugins.attention.blocks.tables import Parts, longest_dense

_GROUP = 256
"""The most queries of a group of several blocks. Larger groups copy fewer keys, and compute more masked scores."""


def block_tables(parts: Parts, attributes: Mapping[str, Any], *, heads: int) -> str:
    """Return a function that makes the tables of equal layers, in ONNX's textual syntax.

    The inputs of the function are the operator's mask and the table, if there is one. The outputs are

    * query_index, [groups, heads, group], and key_index, [groups, heads, span]: rows of the states;
    * bias, [groups, 1 or heads, 1 or group, span], float32: added to scores;
    * global_index, [batch, heads, global], and global_bias, [batch, 1, 1, tokens]: the rows of the queries of global
      blocks, and the bias of their keys; both are undefined without global blocks;
    * place_index, [batch, tokens, heads]: the place of each result in the rows of all groups, which the rows of global
      queries follow;
    * sees_any, [batch, tokens, 1 or heads, 1], float32; undefined where a window sees its own block.

    Args:
        parts: the parts of the operator's node.
        attributes: the attributes of the node.
        heads: the number of heads of the states.
    """
    block, first, repeats = (int(attributes[name]) for name in ("block_size", "first_global", "first_repeats"))
    # A row of the table is of one block.
    grouped = 1 if parts.listed else max(1, _GROUP // block)
    # Of a group's span of keys.
    front = max(first, min(repeats, 1)) * block
    last = block * parts.last
    near = (grouped + 2 * parts.window) * block if parts.window >= 0 else 0
    numbers = {
        "heads": heads,
        "block": block,
        "grouped": grouped,
        "group": grouped * block,
        "first": first,
        "window": parts.window,
        "front": front,
        "near": near,
        "before_near": front + last,
        "span": front + last + near,
        "longest_dense": longest_dense(attributes, listed=parts.listed),
        "first_rows": first * block,
        "global_rows": first * block + last,
        "first_log": math.log(max(1, repeats + (first > 0))),
    }
    sections = [
        _SHARED,
        _ends_of_texts(parts),
        _LAST_BLOCK if parts.last else "",
        _GROUPS,
        _LISTED_HEADS if parts.listed else _ONE_HEAD,
        *_keys(parts),
        _SHORT_TEXTS,
        _VISIBLE,
        _NEAR_ROWS if parts.window >= 0 and grouped > 1 else _ROWS_ALIKE,
        _INDEX,
        *_global_rows(parts),
        _SEES_ANY.format(or_global=_OR_GLOBAL if parts.global_rows else _OR_NOTHING)
        if parts.window < 0
        else _SEES_ITSELF,
    ]
    named = "_".join(str(number) for number in (heads, block, first, repeats, numbers["longest_dense"]))
    inputs = "token_mask, listed_blocks" if parts.listed else "token_mask"
    return (
        _HEADER.format(name=f"BlockTables_{named}{parts.suffix}", inputs=inputs)
        + "".join(sections).format(**numbers)
        + "}"
    )


def _ends_of_texts(parts: Parts) -> str:
    """Text that makes `ends`, [batch], behind the last token of each text, and `last_block`, [batch], where it counts.

    A text of nothing but padding that ends after its own last real token has the last block -1.
    """
    return (_ENDS_BY_ROW if parts.by_row else _ENDS_TOGETHER) + (_LAST_BLOCK_NUMBER if parts.last else "")


def _keys(parts: Parts) -> list[str]:
    """Text that makes `span_tokens`, [batch, groups, 1 or table heads, span]: outside of the text for no token."""
    near_hidden = {
        (True, True): "Or (near_is_first, near_is_last)",
        (True, False): "Identity (near_is_first)",
        (False, True): "Identity (near_is_last)",
        (False, False): "Less (near_blocks, zero)",
    }[parts.first, parts.last]
    present = {
        "front": (parts.front, _FRONT_KEYS),
        "last": (parts.last, _LAST_KEYS),
        "near": (
            parts.window >= 0,
            _NEAR_KEYS + (_NEAR_IS_LAST if parts.last else "") + _NEAR_HIDDEN.format(near_hidden),
        ),
        "listed": (parts.listed, _LISTED_KEYS),
    }
    names = [f"{name}_keys" for name, (is_there, _) in present.items() if is_there]
    texts = [text for is_there, text in present.values() if is_there]
    return [*texts, f"    span_tokens = Concat <axis = 3> ({', '.join(names)})\n"]


def _global_rows(parts: Parts) -> list[str]:
    """Text that makes the tables of global blocks' queries, and where every token's result is."""
    if not parts.global_rows:
        return [_NO_GLOBAL_ROWS]
    tokens = {"first_row_tokens": parts.first, "last_row_tokens": parts.last}
    joined = ", ".join(name for name, is_there in tokens.items() if is_there)
    is_global = (
        " Or (is_first, is_last)"
        if parts.first and parts.last
        else f"Identity ({'is_first' if parts.first else 'is_last'})"
    )
    return [
        _FIRST_ROWS,
        _LAST_ROWS if parts.last else "",
        f"    all_row_tokens = Concat <axis = 1> ({joined})\n    is_global = {is_global}\n",
        _GLOBAL_ROWS,
    ]


_HEADER = """
{name} ({inputs}) => (query_index, key_index, bias, global_index, global_bias, place_index, sees_any) {{
"""

_SHARED = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    any_1d = Constant <value_ints = [-1]> ()
    inner_axes = Constant <value_ints = [1, 2, 3]> ()
    nowhere = Constant <value_int = -1> ()
    heads = Constant <value_int = {heads}> ()
    block = Constant <value_int = {block}> ()
    first_global = Constant <value_int = {first}> ()
    nothing = Constant <value_float = 0.0> ()
    masked = Constant <value_float = -1.0e30> ()
    batch_1d = Shape <start = 0, end = 1> (token_mask)
    batch = Squeeze (batch_1d)
    tokens_1d = Shape <start = 1, end = 2> (token_mask)
    tokens = Squeeze (tokens_1d)
    last_token = Sub (tokens, one)
    real = Cast <to = 9> (token_mask)
    block_range = Range (zero, block, one)
    texts = Range (zero, batch, one)
    text_row_starts = Mul (texts, tokens)
    text_starts = Unsqueeze (text_row_starts, inner_axes)
    head_range = Range (zero, heads, one)
    head_column = Unsqueeze (head_range, one_1d)
"""

_ENDS_TOGETHER = """
    ends = Expand (tokens, batch_1d)
"""

_ENDS_BY_ROW = """
    behind = Add (tokens, one)
    ordinals = Range (one, behind, one)
    real_numbers = Cast <to = 7> (real)
    real_ordinals = Mul (real_numbers, ordinals)
    ends = ReduceMax <keepdims = 0> (real_ordinals, one_1d)
"""

_LAST_BLOCK_NUMBER = """
    rounding = Sub (block, one)
    rounded_ends = Add (ends, rounding)
    ended_blocks = Div (rounded_ends, block)
    last_block = Sub (ended_blocks, one)
"""

_LAST_BLOCK = """
    last_starts_1d = Mul (last_block, block)
    last_starts = Unsqueeze (last_starts_1d, one_1d)
    last_tokens = Add (last_starts, block_range)
"""

_GROUPS = """
    longest_dense = Constant <value_int = {longest_dense}> ()
    is_short_1d = LessOrEqual (ends, longest_dense)
    is_short = Unsqueeze (is_short_1d, inner_axes)
    longest_end = ReduceMax <keepdims = 0> (ends)
    shortest_end = ReduceMin <keepdims = 0> (ends)
    all_short = LessOrEqual (longest_end, longest_dense)
    any_short = LessOrEqual (shortest_end, longest_dense)
    whole_group = Constant <value_int = {group}> ()
    group = Where (all_short, tokens, whole_group)
    group_1d = Unsqueeze (group, zero_1d)
    last_group = Div (last_token, group)
    groups = Add (last_group, one)
    groups_1d = Unsqueeze (groups, zero_1d)
    group_numbers = Range (zero, groups, one)
    group_column = Unsqueeze (group_numbers, one_1d)
    group_starts = Mul (group_column, group)
    group_range = Range (zero, group, one)
    group_tokens = Add (group_starts, group_range)
    query_tokens_2d = Min (group_tokens, last_token)
    query_tokens = Unsqueeze (query_tokens_2d, one_1d)
"""

_ONE_HEAD = """
    of_groups = Concat <axis = 0> (batch_1d, groups_1d, one_1d, one_1d)
"""

_LISTED_HEADS = """
    table_heads_1d = Shape <start = 0, end = 1> (listed_blocks)
    of_groups = Concat <axis = 0> (batch_1d, groups_1d, table_heads_1d, one_1d)
"""

_FRONT_KEYS = """
    front = Constant <value_int = {front}> ()
    front_range = Range (zero, front, one)
    front_keys = Expand (front_range, of_groups)
"""

_LAST_KEYS = """
    first_tokens = Mul (first_global, block)
    last_is_first = Less (last_starts, first_tokens)
    last_once = Where (last_is_first, nowhere, last_tokens)
    middle_axes = Constant <value_ints = [1, 2]> ()
    last_column = Unsqueeze (last_once, middle_axes)
    last_keys = Expand (last_column, of_groups)
"""

# Blocks before the text have tokens below 0.
_NEAR_KEYS = """
    near = Constant <value_int = {near}> ()
    window = Constant <value_int = {window}> ()
    grouped = Constant <value_int = {grouped}> ()
    near_range = Range (zero, near, one)
    near_offsets = Div (near_range, block)
    first_blocks = Mul (group_column, grouped)
    near_first_blocks = Sub (first_blocks, window)
    near_blocks_2d = Add (near_first_blocks, near_offsets)
    near_blocks = Unsqueeze (near_blocks_2d, one_1d)
    near_starts = Mul (near_first_blocks, block)
    near_tokens_2d = Add (near_starts, near_range)
    near_tokens = Unsqueeze (near_tokens_2d, one_1d)
    near_is_first = Less (near_blocks, first_global)
"""

_NEAR_IS_LAST = """
    last_block_column = Unsqueeze (last_block, inner_axes)
    near_is_last = Equal (near_blocks, last_block_column)
"""

_NEAR_HIDDEN = """
    near_is_hidden = {}
    near_once = Where (near_is_hidden, nowhere, near_tokens)
    near_keys = Expand (near_once, of_groups)
"""

# Rows beyond the table list nothing, and neither do entries that are not a block of the text.
_LISTED_KEYS = """
    last_number = Div (last_token, block)
    blocks = Add (last_number, one)
    table = Cast <to = 7> (listed_blocks)
    first_global_1d = Unsqueeze (first_global, zero_1d)
    table_padding = Concat <axis = 0> (zero_1d, first_global_1d, zero_1d, zero_1d, groups_1d, zero_1d)
    padded_table = Pad (table, table_padding, nowhere)
    own_table = Slice (padded_table, zero_1d, groups_1d, one_1d)
    table_below = Min (own_table, blocks)
    bounded_table = Max (table_below, nowhere)
    group_table = Transpose <perm = [1, 0, 2]> (bounded_table)
    listed_starts_3d = Mul (group_table, block)
    listed_starts = Unsqueeze (listed_starts_3d, any_1d)
    listed_tokens_4d = Add (listed_starts, block_range)
    listed_shape = Constant <value_ints = [0, 0, -1]> ()
    listed_tokens = Reshape (listed_tokens_4d, listed_shape)
    listed_keys = Expand (listed_tokens, of_groups)
"""

# A short text sees its own tokens in order.
_SHORT_TEXTS = """
    three_1d = Constant <value_ints = [3]> ()
    sparse_span_1d = Shape <start = 3, end = 4> (span_tokens)
    sparse_span = Squeeze (sparse_span_1d)
    dense_keys = Min (tokens, longest_dense)
    short_span = Max (dense_keys, one)
    any_short_span = Where (any_short, short_span, one)
    mixed_span = Max (any_short_span, sparse_span)
    span = Where (all_short, short_span, mixed_span)
    span_1d = Unsqueeze (span, zero_1d)
    span_missing = Sub (mixed_span, sparse_span)
    span_missing_1d = Unsqueeze (span_missing, zero_1d)
    span_before = Constant <value_ints = [0, 0, 0, 0, 0, 0, 0]> ()
    span_padding = Concat <axis = 0> (span_before, span_missing_1d)
    padded_span_tokens = Pad (span_tokens, span_padding, nowhere)
    sparse_tokens = Slice (padded_span_tokens, zero_1d, span_1d, three_1d)
    slots = Range (zero, span, one)
    key_tokens = Where (is_short, slots, sparse_tokens)
"""

_VISIBLE = """
    key_is_behind_start = GreaterOrEqual (key_tokens, zero)
    key_is_before_end = Less (key_tokens, tokens)
    key_exists = And (key_is_behind_start, key_is_before_end)
    key_below_end = Min (key_tokens, last_token)
    key_in_text = Max (key_below_end, zero)
    key_rows = Add (key_in_text, text_starts)
    all_real = Reshape (real, any_1d)
    key_is_real = Gather <axis = 0> (all_real, key_rows)
    visible = And (key_exists, key_is_real)
    visible_column = Unsqueeze (visible, three_1d)
"""

# Blocks of a group have neighbours of their own.
_NEAR_ROWS = """
    row_count = Where (all_short, one, group)
    rows = Range (zero, row_count, one)
    row_offsets = Div (rows, block)
    row_column = Unsqueeze (row_offsets, one_1d)
    before_near = Constant <value_int = {before_near}> ()
    near_slots = Sub (slots, before_near)
    slot_numbers = Div (near_slots, block)
    slot_offsets = Sub (slot_numbers, window)
    row_distances = Sub (slot_offsets, row_column)
    is_left = LessOrEqual (row_distances, window)
    least_distance = Neg (window)
    is_right = GreaterOrEqual (row_distances, least_distance)
    is_near = And (is_left, is_right)
    sees_all = Less (slots, before_near)
    is_of_row = Or (is_near, sees_all)
    is_short_text = Unsqueeze (is_short, any_1d)
    is_of_text_row = Or (is_of_row, is_short_text)
    seen = And (visible_column, is_of_text_row)
"""

_ROWS_ALIKE = """
    seen = Identity (visible_column)
"""

# log(m) for keys that count m times.
_INDEX = """
    first_log = Constant <value_float = {first_log}> ()
    counts_more = Less (slots, block)
    slot_logs = Where (counts_more, first_log, nothing)
    text_logs = Where (is_short, nothing, slot_logs)
    logs = Unsqueeze (text_logs, three_1d)
    text_bias = Where (seen, logs, masked)
    bias_axes = Shape <start = 2> (text_bias)
    bias_shape = Concat <axis = 0> (any_1d, bias_axes)
    bias = Reshape (text_bias, bias_shape)

    heads_1d = Unsqueeze (heads, zero_1d)
    key_row_starts = Mul (key_rows, heads)
    text_key_index = Add (key_row_starts, head_column)
    key_shape = Concat <axis = 0> (any_1d, heads_1d, span_1d)
    key_index = Reshape (text_key_index, key_shape)
    query_rows = Add (query_tokens, text_starts)
    query_row_starts = Mul (query_rows, heads)
    text_query_index = Add (query_row_starts, head_column)
    query_shape = Concat <axis = 0> (any_1d, heads_1d, group_1d)
    query_index = Reshape (text_query_index, query_shape)

    token_range = Range (zero, tokens, one)
    own_groups = Div (token_range, group)
    own_group_starts = Mul (own_groups, group)
    own_rows = Sub (token_range, own_group_starts)
    own_row_column = Unsqueeze (own_rows, one_1d)
    text_numbers = Unsqueeze (texts, one_1d)
    text_groups = Mul (text_numbers, groups)
    token_groups = Add (text_groups, own_groups)
    token_group_column = Unsqueeze (token_groups, any_1d)
    token_group_heads = Mul (token_group_column, heads)
    token_heads = Add (token_group_heads, head_range)
    token_head_starts = Mul (token_heads, group)
    group_places = Add (token_head_starts, own_row_column)
"""

_NO_GLOBAL_ROWS = """
    global_index = Identity (zero_1d)
    global_bias = Identity (nothing)
    place_index = Identity (group_places)
"""

_FIRST_ROWS = """
    first_rows = Constant <value_int = {first_rows}> ()
    first_row_range = Range (zero, first_rows, one)
    rows_of_texts = Concat <axis = 0> (batch_1d, one_1d)
    first_row_tokens = Expand (first_row_range, rows_of_texts)
    token_blocks = Div (token_range, block)
    is_first_row = Less (token_range, first_rows)
    tokens_of_texts = Concat <axis = 0> (batch_1d, tokens_1d)
    is_first = Expand (is_first_row, tokens_of_texts)
"""

_LAST_ROWS = """
    last_row_tokens = Identity (last_tokens)
    last_number_column = Unsqueeze (last_block, one_1d)
    is_last = Equal (token_blocks, last_number_column)
"""

# Where all texts are short, their group has all results, and one global row is computed that nothing reads: OpenVINO's
# attention was not seen to compute none.
_GLOBAL_ROWS = """
    all_global = Constant <value_int = {global_rows}> ()
    global_count = Where (all_short, one, all_global)
    global_count_1d = Unsqueeze (global_count, zero_1d)
    row_tokens = Slice (all_row_tokens, zero_1d, global_count_1d, one_1d)
    row_tokens_below = Min (row_tokens, last_token)
    row_tokens_in_text = Max (row_tokens_below, zero)
    text_row_column = Unsqueeze (text_row_starts, one_1d)
    global_rows = Add (row_tokens_in_text, text_row_column)
    global_starts = Mul (global_rows, heads)
    global_start_row = Unsqueeze (global_starts, one_1d)
    global_index = Add (global_start_row, head_column)
    token_bias = Where (real, nothing, masked)
    global_axes = Constant <value_ints = [1, 2]> ()
    global_bias = Unsqueeze (token_bias, global_axes)

    group_row_shape = Shape (query_index)
    all_group_rows = ReduceProd <keepdims = 0> (group_row_shape)
    block_starts = Mul (token_blocks, block)
    rows_in_block = Sub (token_range, block_starts)
    last_slots = Add (rows_in_block, first_rows)
    global_slots = Where (is_first_row, token_range, last_slots)
    global_slot_column = Unsqueeze (global_slots, one_1d)
    text_head_starts = Mul (text_numbers, heads)
    text_heads_2d = Add (text_head_starts, head_range)
    text_heads = Unsqueeze (text_heads_2d, one_1d)
    global_row_starts = Mul (text_heads, global_count)
    rows_behind_groups = Add (global_row_starts, all_group_rows)
    global_places = Add (rows_behind_groups, global_slot_column)
    some_long = Not (all_short)
    is_placed = And (is_global, some_long)
    is_placed_column = Unsqueeze (is_placed, any_1d)
    place_index = Where (is_placed_column, global_places, group_places)
"""

_SEES_ANY = """
    visible_numbers = Cast <to = 1> (visible)
    group_sees_any = ReduceMax <keepdims = 0> (visible_numbers, any_1d)
    token_sees_any = Gather <axis = 1> (group_sees_any, own_groups)
    {or_global}
    sees_any = Unsqueeze (row_sees_any, any_1d)
"""

_OR_GLOBAL = """
    global_numbers = Cast <to = 1> (is_global)
    global_column = Unsqueeze (global_numbers, any_1d)
    row_sees_any = Max (token_sees_any, global_column)
"""

_OR_NOTHING = """
    row_sees_any = Identity (token_sees_any)
"""

_SEES_ITSELF = """
    sees_any = Identity (nothing)
"""
