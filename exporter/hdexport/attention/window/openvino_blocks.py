"""Blocks of queries against the spans that their windows reach, as function bodies for OpenVINO.

Numbers that count tokens are integers: in bfloat16, OpenVINO rounds numbers above 256.
"""

from __future__ import annotations

from onnx_ir import DataType, Value

from hdplugins.attention.function_parts import MASKED, column, transpose_heads_and_tokens, upcast
from hdplugins.op_builder import OpBuilder

_BLOCK = 256
"""Queries of a block, at most. Larger blocks copy fewer keys twice, and compute more scores that are masked."""


def window_tables(
    op: OpBuilder, token_kind: Value, *, left: int, right: int, step: int, bound: int, group: int
) -> tuple[Value, Value, Value, Value]:
    """The tables of layers with equal windows.

    A row is every step-th token, one sequence per residue. Blocks are as many as there must be, and of one size. A span
    that would begin before the text, or end behind it, is moved: so it is never longer than the text, and a text of one
    block is attended to densely.

    Args:
        token_kind: [batch, tokens], int32, as of the operator.
        left, right: steps that a window reaches before and after its query.
        step: tokens of a step.
        bound: the most global tokens of a text.
        group: heads of queries that share a head of keys.

    Returns:
        * the tokens of each block, [batch * blocks * step, block], and of its span, [batch * blocks * step, span], as
            rows of the states of all texts;
        * what is added to scores, [batch * blocks * step, 1, group * block, span], float32;
        * which queries are answered, [batch * blocks * step, block, 1, 1], float32.
    """
    tokens_1d = op.Shape(token_kind, start=1)
    tokens = op.Squeeze(tokens_1d)
    last_token = op.Sub(tokens, 1)
    rows = op.Div(op.Add(last_token, step), step)
    last_row = op.Sub(rows, 1)
    blocks = op.Add(op.Div(last_row, _BLOCK), 1)
    block = op.Div(op.Add(last_row, blocks), blocks)
    span = op.Min(op.Add(block, left + right), rows)
    block_starts = op.Mul(column(op, blocks), block)  # [blocks, 1]
    span_starts = op.Max(op.Min(op.Sub(block_starts, left), op.Sub(rows, span)), 0)
    query_rows = op.Add(block_starts, op.Range(0, block, 1))  # [blocks, block]
    key_rows = op.Add(span_starts, op.Range(0, span, 1))  # [blocks, span]

    offsets = op.Sub(op.Unsqueeze(key_rows, [1]), op.Unsqueeze(query_rows, [-1]))  # [blocks, block, span]
    near = op.And(op.GreaterOrEqual(offsets, -left), op.LessOrEqual(offsets, right))

    residues = column(op, step)
    query_tokens = op.Add(op.Unsqueeze(op.Mul(query_rows, step), [1]), residues)  # [blocks, step, block]
    key_tokens = op.Add(op.Unsqueeze(op.Mul(key_rows, step), [1]), residues)  # [blocks, step, span]
    query_in_text, key_in_text = op.Min(query_tokens, last_token), op.Min(key_tokens, last_token)
    is_local = op.Equal(token_kind, op.CastLike(1, token_kind))
    visible = op.And(op.Gather(is_local, key_in_text, axis=1), op.Less(key_tokens, tokens))
    seen = op.And(op.Unsqueeze(visible, [-2]), op.Unsqueeze(near, [1]))  # [batch, blocks, step, block, span]
    bias = op.Where(seen, 0.0, MASKED)

    texts = op.Range(0, op.Squeeze(op.Shape(token_kind, end=1)), 1)
    text_starts = op.Unsqueeze(op.Mul(texts, tokens), [1, 2, 3])
    queries, keys = op.Add(query_in_text, text_starts), op.Add(key_in_text, text_starts)
    if bound:
        # TopK needs at least as many values as it returns, whatever the length of the text: hence the padding.
        kinds = op.Pad(upcast(op, token_kind), [0, 0, 0, bound])
        top_kinds, top_tokens = op.TopK(kinds, [bound], axis=1, _outputs=2)
        global_rows = op.Add(op.Unsqueeze(op.Min(top_tokens, last_token), [1, 2]), text_starts)
        global_bias = op.Unsqueeze(op.Where(op.Greater(top_kinds, 1.5), 0.0, MASKED), [1, 2, 3])
        keys, bias = _joined(op, keys, global_rows, bound, axes=3), _joined(op, bias, global_bias, bound, axes=4)

    block_1d, span_1d = op.Unsqueeze(block, [0]), op.Shape(keys, start=3)
    is_real = op.Cast(op.Gather(token_kind, query_in_text, axis=1), to=DataType.BOOL)
    sees_any = op.Equal(op.ReduceMax(bias, [-1], keepdims=0), 0.0)
    answers = upcast(op, op.And(is_real, sees_any))
    flat_bias = op.Reshape(bias, op.Concat([-1, 1], block_1d, span_1d, axis=0))
    return (
        op.Reshape(queries, op.Concat([-1], block_1d, axis=0)),
        op.Reshape(keys, op.Concat([-1], span_1d, axis=0)),
        # A block of heads that share keys is that of each of them after the other.
        flat_bias if group == 1 else op.Tile(flat_bias, [1, 1, group, 1]),
        op.Reshape(answers, op.Concat([-1], block_1d, [1, 1], axis=0)),
    )


def _joined(op: OpBuilder, of_windows: Value, of_globals: Value, bound: int, *, axes: int) -> Value:
    """Values of spans, and behind them those of the global tokens, which are repeated along the first axes."""
    shape = op.Concat(op.Shape(of_windows, end=axes), [bound], axis=0)
    return op.Concat(of_windows, op.Expand(of_globals, shape), axis=-1)


def attend_in_blocks(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    query_index: Value,
    key_index: Value,
    bias: Value,
    answers: Value,
    token_kind: Value,
    *,
    step: int,
    grouped: bool,
    padded: bool,
    scale: float,
) -> Value:
    """The attention of a layer, [batch, tokens, heads, head_dim].

    Args:
        query: [batch, tokens, heads, head_dim].
        key, value: [batch, tokens, kv_heads, head_dim].
        query_index, key_index, bias, answers: the results of `window_tables`.
        token_kind: [batch, tokens], int32, as of the operator.
        grouped: whether heads of queries share keys.
        padded: whether batches may have padding, or queries that see no key: their rows are 0.
    """
    head_shape, key_head_shape = op.Shape(query, start=2), op.Shape(key, start=2)
    key_row_shape = op.Concat([-1], key_head_shape, axis=0)
    query_rows = op.Reshape(query, op.Concat([-1], head_shape, axis=0))
    key_rows, value_rows = op.Reshape(key, key_row_shape), op.Reshape(value, key_row_shape)
    # [batch * blocks * step, heads, block, head_dim], and of keys [..., kv_heads, span, head_dim]
    queries, keys, values = (
        transpose_heads_and_tokens(op, op.Gather(rows, index, axis=0))
        for rows, index in ((query_rows, query_index), (key_rows, key_index), (value_rows, key_index))
    )
    if grouped:
        # The queries of heads that share keys are rows of one product, so that no key is copied for each head.
        head_dim = op.Shape(query, start=3)
        kv_heads = op.Shape(key, start=2, end=3)
        queries = op.Reshape(queries, op.Concat([0], kv_heads, [-1], head_dim, axis=0))
    sums = op.Attention(queries, keys, values, bias, scale=scale)
    if grouped:
        heads = op.Shape(query, start=2, end=3)
        sums = op.Reshape(sums, op.Concat([0], heads, [-1], head_dim, axis=0))
    block_rows = transpose_heads_and_tokens(op, sums)
    if padded:
        block_rows = op.Mul(block_rows, answers)
    by_residue = op.Reshape(block_rows, op.Concat([-1, step], op.Shape(query_index, start=1), head_shape, axis=0))
    in_order = op.Transpose(by_residue, perm=[0, 2, 1, 3, 4])
    rows_and_more = op.Reshape(in_order, op.Concat(op.Shape(token_kind, end=1), [-1], head_shape, axis=0))
    return op.Slice(rows_and_more, [0], op.Shape(token_kind, start=1), [1])
