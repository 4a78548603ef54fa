"""Groups of blocks of queries and the keys that any of the blocks sees, as function bodies for OpenVINO.

Rows of the states, [head_dim], are numbered through: (text * tokens + token) * heads + head. Numbers that count tokens
are integers: in bfloat16, OpenVINO rounds numbers above 256.
"""

from __future__ import annotations

import math

from onnx_ir import DataType, Value

from hdplugins.attention.blocks.tables import Parts
from hdplugins.attention.function_parts import MASKED, column, transpose_heads_and_tokens, upcast
from hdplugins.op_builder import OpBuilder

_GROUP = 256
"""The most queries of a group of several blocks. Larger groups copy fewer keys, and compute more masked scores."""

_NOWHERE = -1
"""A token that is not in the text."""


def group_tables(
    op: OpBuilder,
    token_mask: Value,
    listed_blocks: Value | None = None,
    *,
    parts: Parts,
    block: int,
    first: int,
    repeats: int,
    longest_dense: int,
    heads: int,
) -> tuple[Value, ...]:
    """The tables of equal layers.

    Args:
        token_mask: [batch, tokens], as of the operator.
        listed_blocks: [1 or heads, rows, listed], as of the operator.
        block: tokens of a block.
        first: global blocks at the beginning.
        repeats: how often block 0 is seen once more.
        longest_dense: tokens up to which every query of a text sees every key once.

    Returns:
        * query_index, [groups, heads, group], and key_index, [groups, heads, span]: rows of the states;
        * bias, [groups, 1 or heads, 1 or group, span], float32: added to scores;
        * place_index, [batch, tokens, heads]: the place of each result in the rows of all groups, which the rows of
            global queries follow;
        * answers, [batch, tokens, 1 or heads, 1], float32: 0 for padding, and for queries that see no key;
        * with global blocks, global_index, [batch, heads, global], and global_bias, [batch, 1, 1, tokens]: the rows of
            the queries of global blocks, and the bias of their keys.
    """
    texts = _Texts(op, token_mask, parts, block=block, first=first, longest_dense=longest_dense)
    front = max(first, min(repeats, 1)) * block
    span_tokens = _span_tokens(op, texts, listed_blocks, front=front)
    slots, key_tokens = _with_short_texts(op, texts, span_tokens, longest_dense)
    exists = op.And(op.GreaterOrEqual(key_tokens, 0), op.Less(key_tokens, texts.tokens))
    key_rows = op.Add(op.Max(op.Min(key_tokens, texts.last_token), 0), texts.starts)
    visible = op.And(exists, op.Gather(op.Reshape(texts.real, [-1]), key_rows, axis=0))
    seen = op.Unsqueeze(visible, [3])  # [batch, groups, 1 or heads, 1, span]
    if parts.window >= 0 and texts.grouped > 1:
        seen = op.And(seen, _sees_near(op, texts, slots, before_near=front + parts.last * block))
    # log(m) for keys that count m times.
    slot_logs = op.Where(op.Less(slots, block), math.log(max(1, repeats + (first > 0))), 0.0)
    logs = op.Where(texts.is_short, 0.0, slot_logs)
    bias = op.Where(seen, op.Unsqueeze(logs, [3]), MASKED)

    query_rows = op.Add(op.Unsqueeze(op.Min(texts.group_tokens, texts.last_token), [1]), texts.starts)
    index_shapes = (op.Concat([-1, heads], each, axis=0) for each in (op.Unsqueeze(texts.group, [0]), op.Shape(slots)))
    query_index, key_index = (
        op.Reshape(op.Add(op.Mul(rows, heads), column(op, heads)), shape)
        for rows, shape in zip((query_rows, key_rows), index_shapes, strict=True)
    )
    own_groups = op.Div(texts.places, texts.group)  # [tokens]
    own_rows = op.Sub(texts.places, op.Mul(own_groups, texts.group))
    token_groups = op.Add(op.Mul(texts.numbers, texts.groups), own_groups)  # [batch, tokens]
    token_heads = op.Add(op.Mul(op.Unsqueeze(token_groups, [-1]), heads), op.Range(0, heads, 1))
    place_index = op.Add(op.Mul(token_heads, texts.group), op.Unsqueeze(own_rows, [1]))

    answers = op.Unsqueeze(upcast(op, texts.real), [2, 3])
    if parts.window < 0:
        # With a window, every query sees its own block.
        sees_any = op.Gather(op.ReduceMax(upcast(op, visible), [-1], keepdims=0), own_groups, axis=1)
        if parts.global_rows:
            sees_any = op.Max(sees_any, op.Unsqueeze(upcast(op, texts.is_global), [-1]))
        answers = op.Mul(answers, op.Unsqueeze(sees_any, [-1]))
    global_tables: list[Value] = []
    if parts.global_rows:
        group_rows = op.ReduceProd(op.Shape(query_index), keepdims=0)
        global_places, *global_tables = _global_tables(op, texts, group_rows, heads)
        is_placed = op.And(texts.is_global, op.Not(texts.all_short))
        place_index = op.Where(op.Unsqueeze(is_placed, [-1]), global_places, place_index)
    flat_bias = op.Reshape(bias, op.Concat([-1], op.Shape(bias, start=2), axis=0))
    return query_index, key_index, flat_bias, place_index, answers, *global_tables


class _Texts:
    """The texts, and the groups of their queries: one of the whole text where all texts are short.

    Attributes:
        parts, block, first: see `group_tables`.
        grouped: blocks of a group.
        batch_1d: [1], the number of texts.
        numbers: [batch, 1], of the texts, from 0.
        starts: [batch, 1, 1, 1], the row of each text's first token among the tokens of all texts.
        tokens: [], the number of tokens of a text.
        last_token: [], the number of the last token.
        places: [tokens], from 0.
        real: [batch, tokens], bool.
        is_short: [batch, 1, 1, 1], whether a text is attended to densely.
        all_short, any_short: [].
        last_block: [batch, 1], the last block of each text; -1 for a text of padding that ends after its own last real
            token. Where the last block is global.
        last_tokens: [batch, block], of the last block.
        is_global: [batch, tokens] or [tokens], whether a token is of a global block.
        group: [], queries of a group.
        groups: [], the number of groups.
        group_numbers: [groups, 1], from 0.
        group_tokens: [groups, group]; they go on behind the text.
    """

    def __init__(
        self, op: OpBuilder, token_mask: Value, parts: Parts, *, block: int, first: int, longest_dense: int
    ) -> None:
        self.parts, self.block, self.first = parts, block, first
        # A row of the table is of one block.
        self.grouped = 1 if parts.listed else max(1, _GROUP // block)
        self.batch_1d = op.Shape(token_mask, end=1)
        self.tokens = op.Squeeze(op.Shape(token_mask, start=1))
        self.numbers = column(op, op.Squeeze(self.batch_1d))
        self.starts = op.Unsqueeze(op.Mul(self.numbers, self.tokens), [2, 3])
        self.last_token, self.places = op.Sub(self.tokens, 1), op.Range(0, self.tokens, 1)
        self.real = op.Cast(token_mask, to=DataType.BOOL)

        # Behind the last token of each text, [batch].
        ends = op.Expand(self.tokens, self.batch_1d)
        if parts.by_row:
            ordinals = op.Mul(op.Cast(self.real, to=DataType.INT64), op.Add(self.places, 1))
            ends = op.ReduceMax(ordinals, [1], keepdims=0)
        self.is_short = op.Unsqueeze(op.LessOrEqual(ends, longest_dense), [1, 2, 3])
        self.all_short = op.LessOrEqual(op.ReduceMax(ends, keepdims=0), longest_dense)
        self.any_short = op.LessOrEqual(op.ReduceMin(ends, keepdims=0), longest_dense)
        self.is_global = op.Less(self.places, first * block)
        if parts.last:
            self.last_block = op.Unsqueeze(op.Sub(op.Div(op.Add(ends, block - 1), block), 1), [1])
            self.last_tokens = op.Add(op.Mul(self.last_block, block), op.Range(0, block, 1))
            is_last = op.Equal(op.Div(self.places, block), self.last_block)
            self.is_global = op.Or(self.is_global, is_last)

        self.group = op.Where(self.all_short, self.tokens, self.grouped * block)
        self.groups = op.Add(op.Div(self.last_token, self.group), 1)
        self.group_numbers = column(op, self.groups)
        self.group_tokens = op.Add(op.Mul(self.group_numbers, self.group), op.Range(0, self.group, 1))


def _span_tokens(op: OpBuilder, texts: _Texts, listed_blocks: Value | None, *, front: int) -> Value:
    """The keys of each group, [batch, groups, 1 or table heads, span]: outside of the text for no token."""
    parts, block = texts.parts, texts.block
    groups_1d = op.Unsqueeze(texts.groups, [0])
    table_heads = [1] if listed_blocks is None else op.Shape(listed_blocks, end=1)
    keys = []
    if front:
        keys.append(op.Range(0, front, 1))
    if parts.last:
        is_first = op.Less(texts.last_block, texts.first)
        keys.append(op.Unsqueeze(op.Where(is_first, _NOWHERE, texts.last_tokens), [1, 2]))
    if parts.window >= 0:
        near = op.Range(0, (texts.grouped + 2 * parts.window) * block, 1)
        first_blocks = op.Sub(op.Mul(texts.group_numbers, texts.grouped), parts.window)  # [groups, 1]
        blocks = op.Unsqueeze(op.Add(first_blocks, op.Div(near, block)), [1])
        # Blocks before the text have tokens below 0.
        tokens = op.Unsqueeze(op.Add(op.Mul(first_blocks, block), near), [1])
        is_elsewhere = op.Less(blocks, texts.first)
        if parts.last:
            is_elsewhere = op.Or(is_elsewhere, op.Equal(blocks, op.Unsqueeze(texts.last_block, [2, 3])))
        keys.append(op.Where(is_elsewhere, _NOWHERE, tokens))
    if listed_blocks is not None:
        # Rows beyond the table list nothing, and neither do entries that are not a block of the text.
        padding = op.Concat([0, texts.first, 0, 0], groups_1d, [0], axis=0)
        padded_table = op.Pad(op.Cast(listed_blocks, to=DataType.INT64), padding, _NOWHERE)
        table = op.Slice(padded_table, [0], groups_1d, [1])
        number = op.Add(op.Div(texts.last_token, block), 1)
        bounded = op.Max(op.Min(table, number), _NOWHERE)
        starts = op.Unsqueeze(op.Mul(op.Transpose(bounded, perm=[1, 0, 2]), block), [-1])
        keys.append(op.Reshape(op.Add(starts, op.Range(0, block, 1)), [0, 0, -1]))
    of_groups = op.Concat(texts.batch_1d, groups_1d, table_heads, [1], axis=0)
    return op.Concat(*(op.Expand(each, of_groups) for each in keys), axis=3)


def _with_short_texts(op: OpBuilder, texts: _Texts, span_tokens: Value, longest_dense: int) -> tuple[Value, Value]:
    """The slots of a span, [span], and its tokens, as `_span_tokens` has them; a short text sees its own in order."""
    sparse_span = op.Squeeze(op.Shape(span_tokens, start=3))
    short_span = op.Max(op.Min(texts.tokens, longest_dense), 1)
    mixed_span = op.Max(op.Where(texts.any_short, short_span, 1), sparse_span)
    span = op.Where(texts.all_short, short_span, mixed_span)
    missing_1d = op.Unsqueeze(op.Sub(mixed_span, sparse_span), [0])
    padded_tokens = op.Pad(span_tokens, op.Concat([0] * 7, missing_1d, axis=0), _NOWHERE)
    sparse_tokens = op.Slice(padded_tokens, [0], op.Unsqueeze(span, [0]), [3])
    slots = op.Range(0, span, 1)
    return slots, op.Where(texts.is_short, slots, sparse_tokens)


def _sees_near(op: OpBuilder, texts: _Texts, slots: Value, *, before_near: int) -> Value:
    """[batch, 1, 1, group, span], bool: the keys that each row of a group sees, by its block's neighbours."""
    window, rows = texts.parts.window, op.Range(0, op.Where(texts.all_short, 1, texts.group), 1)
    slot_blocks = op.Sub(op.Div(op.Sub(slots, before_near), texts.block), window)
    distances = op.Sub(slot_blocks, op.Unsqueeze(op.Div(rows, texts.block), [1]))  # [group, span]
    is_near = op.And(op.LessOrEqual(distances, window), op.GreaterOrEqual(distances, -window))
    return op.Or(op.Or(is_near, op.Less(slots, before_near)), op.Unsqueeze(texts.is_short, [-1]))


def _global_tables(op: OpBuilder, texts: _Texts, group_rows: Value, heads: int) -> tuple[Value, Value, Value]:
    """The places of global queries' results, [batch, tokens, heads], and global_index and global_bias.

    Where all texts are short, their group has all results, and one global row is computed that nothing reads:
    OpenVINO's attention was not seen to compute none.
    """
    parts, block, first_rows = texts.parts, texts.block, texts.first * texts.block
    tokens = []
    if parts.first:
        tokens.append(op.Expand(op.Range(0, first_rows, 1), op.Concat(texts.batch_1d, [1], axis=0)))
    if parts.last:
        tokens.append(texts.last_tokens)
    count = op.Where(texts.all_short, 1, first_rows + parts.last * block)
    kept = op.Slice(op.Concat(*tokens, axis=1), [0], op.Unsqueeze(count, [0]), [1])
    tokens_in_text = op.Max(op.Min(kept, texts.last_token), 0)
    token_rows = op.Add(tokens_in_text, op.Mul(texts.numbers, texts.tokens))  # [batch, global]
    global_index = op.Add(op.Unsqueeze(op.Mul(token_rows, heads), [1]), column(op, heads))
    global_bias = op.Unsqueeze(op.Where(texts.real, 0.0, MASKED), [1, 2])

    rows_in_block = op.Sub(texts.places, op.Mul(op.Div(texts.places, block), block))
    is_first = op.Less(texts.places, first_rows)
    rows_in_text = op.Where(is_first, texts.places, op.Add(rows_in_block, first_rows))
    text_heads = op.Unsqueeze(op.Add(op.Mul(texts.numbers, heads), op.Range(0, heads, 1)), [1])  # [batch, 1, heads]
    rows_before = op.Add(op.Mul(text_heads, count), group_rows)
    return op.Add(rows_before, op.Unsqueeze(rows_in_text, [1])), global_index, global_bias


def attend_in_groups(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    query_index: Value,
    key_index: Value,
    bias: Value,
    place_index: Value,
    answers: Value,
    global_index: Value | None = None,
    global_bias: Value | None = None,
    *,
    scale: float,
) -> Value:
    """The attention of a layer, [batch, tokens, heads, head_dim], of states of that shape and what `group_tables`
    gives.
    """
    row_shape = op.Concat([-1], op.Shape(query, start=3), axis=0)
    query_rows, key_rows, value_rows = (op.Reshape(state, row_shape) for state in (query, key, value))
    group_query = op.Gather(query_rows, query_index, axis=0)
    group_key, group_value = (op.Gather(rows, key_index, axis=0) for rows in (key_rows, value_rows))
    rows = op.Reshape(op.Attention(group_query, group_key, group_value, bias, scale=scale), row_shape)
    if global_index is not None:
        global_query = op.Gather(query_rows, global_index, axis=0)
        keys, values = (transpose_heads_and_tokens(op, state) for state in (key, value))
        global_sums = op.Attention(global_query, keys, values, global_bias, scale=scale)
        rows = op.Concat(rows, op.Reshape(global_sums, row_shape), axis=0)
    # The rows of padding are 0 by definition. All layers' products take less than 1 % of the time: no second graph.
    return op.Mul(op.Gather(rows, place_index, axis=0), answers)
