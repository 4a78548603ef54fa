"""Local attention with sides as function bodies of standard ONNX operators.

A block of queries meets the span of keys that its windows reach: scores are [..., block, span], never [tokens, tokens].
Query q of a block has the distance s - q - reach from key s of its span, in every block, so all blocks share one bias
by distance, which also hides the keys beyond a window. The scores with sides are [..., tokens, sides].

The blocks are computed in two variants. In the batched variant, they are one batch of products, which engines fuse. In
the blockwise variant, a loop takes one head of one sequence after another, and an inner loop one block of queries after
another, whose scores fit in a CPU's cache at any batch size.

Everything but the states comes from `token_mask` and the tables, so that a runtime sees that all layers of a model need
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from onnx_ir import DataType, Value

from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import (
    MASKED,
    bshd_body,
    column,
    rows_or_zero,
    steps_of_sequences,
    transpose_heads_and_tokens,
    upcast,
)
from hdplugins.attention.local_global.operator import check_sides
from hdplugins.op_builder import OpBuilder, float_attribute, integer_attribute, scan

_BLOCK_TOKENS = 64
"""The queries of a block. Larger blocks copy fewer keys twice, and compute more scores that are masked; 128 was no
faster."""


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with these inputs and attributes: ``radius`` and ``side_tokens`` decide the body."""
    radius, side_tokens, has_sides = attributes["radius"], attributes["side_tokens"], "side_key" in inputs
    check_sides(side_tokens=side_tokens, side_reach=attributes["side_reach"], has_sides=has_sides)
    return FunctionBodies(
        suffix=f"_radius{radius}" + f"_sides{side_tokens}" * has_sides,
        batched=bshd_body(partial(_batched, radius=radius, side_tokens=side_tokens)),
        blockwise=bshd_body(partial(_blockwise, radius=radius, side_tokens=side_tokens)),
    )


def _batched(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    token_mask: Value,
    local_bias: Value,
    side_key: Value | None = None,
    side_value: Value | None = None,
    side_bias: Value | None = None,
    *,
    radius: int,
    side_tokens: int,
) -> Value:
    blocks = _blocks(op, token_mask, local_bias, radius=radius, is_fixed=True)
    sides = None if side_bias is None else _sides(op, blocks, side_bias, side_tokens)
    scale = op.CastLike(float_attribute(op, "scale"), query)
    # The first and the last token stand in for positions before and after the sequence, whose scores are masked.
    starts = op.Unsqueeze(blocks.starts, [1])
    query_index = op.Min(op.Add(starts, op.Range(0, blocks.block, 1)), blocks.last_token)  # [blocks, block]
    span_positions = op.Add(starts, blocks.span_numbers)  # [blocks, span]
    key_index = op.Min(op.Max(op.Sub(span_positions, blocks.reach), 0), blocks.last_token)
    block_query = op.Gather(op.Mul(query, scale), query_index, axis=2)  # [batch, heads, blocks, block, head_dim]
    block_key, block_value = (op.Gather(state, key_index, axis=2) for state in (key, value))
    products = upcast(op, op.MatMul(block_query, op.Transpose(block_key, perm=[0, 1, 2, 4, 3])))
    by_distance = op.Add(products, op.Unsqueeze(blocks.span_bias, [1]))
    key_bias = op.Unsqueeze(op.Gather(blocks.padded_key_bias, span_positions, axis=1), [1, 3])
    scores = op.Add(by_distance, key_bias)  # [batch, heads, blocks, block, span]
    if sides is None:
        weights = op.CastLike(op.Softmax(scores, axis=-1), query)
        sums = op.MatMul(weights, block_value)
    else:
        side_columns = op.Unsqueeze(op.Transpose(side_key, perm=[0, 2, 3, 1]), [2])
        assert side_value is not None
        block_side_value = op.Unsqueeze(transpose_heads_and_tokens(op, side_value), [2])
        side_products = upcast(op, op.MatMul(block_query, side_columns))
        own_side = op.Unsqueeze(op.Gather(sides.own, query_index, axis=1), [-1])
        rows = _rows_of_sides(op, sides, op.Sub(sides.numbers, own_side))  # [batch, blocks, block, sides]
        block_side_bias = op.Transpose(op.Gather(sides.bias, rows, axis=1), perm=[1, 0, 2, 3, 4])
        side_scores = op.Add(op.Add(side_products, block_side_bias), op.Unsqueeze(sides.key_bias, [1, 2, 3]))
        weights = op.CastLike(op.Softmax(op.Concat(scores, side_scores, axis=-1), axis=-1), query)
        of_span, of_sides = _split_weights(op, blocks, sides, weights)
        sums = op.Add(op.MatMul(of_span, block_value), op.MatMul(of_sides, block_side_value))
    padded = op.Reshape(sums, op.Concat([0, 0], blocks.padded_1d, op.Shape(query, start=3, end=4), axis=0))
    return _real_rows(op, blocks, padded)


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    token_mask: Value,
    local_bias: Value,
    side_key: Value | None = None,
    side_value: Value | None = None,
    side_bias: Value | None = None,
    *,
    radius: int,
    side_tokens: int,
) -> Value:
    query32, key32, value32 = (upcast(op, state) for state in (query, key, value))
    blocks = _blocks(op, token_mask, local_bias, radius=radius, is_fixed=False)
    sides = None if side_bias is None else _sides(op, blocks, side_bias, side_tokens)
    batch_1d, heads_1d, head_dim_1d = (op.Shape(query32, start=axis, end=axis + 1) for axis in (0, 1, 3))
    sequences, heads = steps_of_sequences(op, batch_1d, op.Squeeze(heads_1d))
    padded_query = op.Pad(
        op.Mul(query32, float_attribute(op, "scale")), op.Concat([0] * 6, blocks.after_1d, [0], axis=0)
    )
    queries = op.Reshape(padded_query, op.Concat([-1], blocks.count_1d, blocks.block_1d, head_dim_1d, axis=0))
    around = op.Concat([0, 0], blocks.reach_1d, [0, 0, 0], blocks.reach_after_1d, [0], axis=0)
    padded_key, padded_value = (op.Pad(state, around) for state in (key32, value32))
    keys_shape = op.Concat([-1], op.Shape(padded_key, start=2, end=3), head_dim_1d, axis=0)
    keys, values = (op.Reshape(state, keys_shape) for state in (padded_key, padded_value))
    rows_shape = op.Concat(blocks.padded_1d, head_dim_1d, axis=0)
    side_keys = side_values = side_rows = own_side_blocks = None
    if sides is not None:
        assert side_key is not None
        assert side_value is not None
        sides_shape = op.Concat([-1], sides.count_1d, head_dim_1d, axis=0)
        side_keys, side_values = (
            op.Reshape(upcast(op, transpose_heads_and_tokens(op, state)), sides_shape)
            for state in (side_key, side_value)
        )
        side_rows = _rows_of_sides(op, sides, op.Sub(sides.numbers, op.Unsqueeze(sides.numbers, [1])))
        own_side = op.Pad(sides.own, op.Concat([0, 0, 0], blocks.after_1d, axis=0))
        own_side_blocks = op.Reshape(own_side, op.Concat([-1], blocks.count_1d, blocks.block_1d, axis=0))

    # A step is one head of one sequence, and a step of the inner loop is one block of its queries.
    def attend_head(
        op: OpBuilder,
        sequence: Value,
        head: Value,
        head_queries: Value,
        head_key: Value,
        head_value: Value,
        head_side_key: Value | None,
        head_side_value: Value | None,
    ) -> Value:
        head_span_bias = op.Gather(blocks.span_bias, head, axis=0)
        sequence_bias = op.Gather(blocks.padded_key_bias, sequence, axis=0)
        bias_of_sides = own_sides = None
        if sides is not None:
            by_side_distance = op.Gather(op.Gather(sides.bias, head, axis=0), side_rows, axis=0)
            bias_of_sides = op.Add(by_side_distance, op.Gather(sides.key_bias, sequence, axis=0))  # [sides, sides]
            own_sides = op.Gather(own_side_blocks, sequence, axis=0)

        def attend(op: OpBuilder, number: Value, start: Value, block_query: Value) -> Value:
            start_1d = op.Unsqueeze(start, [0])
            end_1d = op.Add(start_1d, blocks.span_1d)
            block_key, block_value, key_bias = (
                op.Slice(rows, start_1d, end_1d, [0]) for rows in (head_key, head_value, sequence_bias)
            )
            scores = op.Gemm(block_query, block_key, op.Add(head_span_bias, key_bias), transB=1)
            if sides is None:
                return op.MatMul(op.Softmax(scores, axis=-1), block_value)
            block_side_bias = op.Gather(bias_of_sides, op.Gather(own_sides, number, axis=0), axis=0)
            side_scores = op.Gemm(block_query, head_side_key, block_side_bias, transB=1)
            weights = op.Softmax(op.Concat(scores, side_scores, axis=-1), axis=-1)
            of_span, of_sides = _split_weights(op, blocks, sides, weights)
            return op.Gemm(of_span, block_value, op.MatMul(of_sides, head_side_value))

        sums = scan(op, attend, blocks.numbers, blocks.starts, head_queries, shapes=[("block", "head_dim")])
        return op.Reshape(sums, rows_shape)

    scan_inputs = sequences, heads, queries, keys, values, side_keys, side_values
    scanned = scan(op, attend_head, *scan_inputs, shapes=[("padded", "head_dim")])
    padded = op.Reshape(scanned, op.Concat(batch_1d, heads_1d, blocks.padded_1d, head_dim_1d, axis=0))
    return op.CastLike(_real_rows(op, blocks, padded), query)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Blocks of queries with their spans of keys. Values whose names end in ``_1d`` are [1].

    Attributes:
        tokens_1d: the number of tokens of a sequence.
        last_token: [], the number of the last token.
        block: [], the number of queries of a block; a Python number where it is fixed.
        block_1d: the block as [1].
        reach: [], the tokens of a span on each side of a block; a Python number where it is fixed.
        reach_1d: the reach as [1].
        span_1d: the number of keys of a span.
        count_1d: the number of blocks.
        numbers: [blocks], from 0.
        starts: [blocks], the first query of each block, and the first index of its span in `padded_key_bias`.
        padded_1d: the number of queries of all blocks.
        after_1d: the number of these queries after the sequence.
        reach_after_1d: the number of keys of all spans after the sequence.
        span_numbers: [span], from 0.
        real: [batch, tokens], whether a token is no padding.
        padded_key_bias: [batch, padded + 2 * reach], float32, 0 for real keys.
        span_bias: [heads, block, span], float32, by distance.
    """

    tokens_1d: Value
    last_token: Value
    block: Value | int
    block_1d: Value
    reach: Value | int
    reach_1d: Value
    span_1d: Value
    count_1d: Value
    numbers: Value
    starts: Value
    padded_1d: Value
    after_1d: Value
    reach_after_1d: Value
    span_numbers: Value
    real: Value
    padded_key_bias: Value
    span_bias: Value


def _blocks(op: OpBuilder, token_mask: Value, local_bias: Value, *, radius: int, is_fixed: bool) -> _Blocks:
    """A sequence of a mask, [batch, tokens], in blocks; `local_bias` is [heads, 2 * radius + 1].

    `is_fixed` says whether blocks and spans of shorter sequences have the full size; otherwise they are no larger than
    the sequence needs.
    """
    tokens_1d = op.Shape(token_mask, start=1, end=2)
    tokens = op.Squeeze(tokens_1d)
    last_token = op.Sub(tokens, 1)
    block = _BLOCK_TOKENS if is_fixed else op.Min(_BLOCK_TOKENS, tokens)
    reach = radius if is_fixed else op.Min(radius, last_token)
    block_1d, reach_1d = op.Unsqueeze(block, [0]), op.Unsqueeze(reach, [0])
    span = op.Add(block, op.Mul(reach, 2))
    count = op.Add(op.Div(last_token, block), 1)
    padded_1d = op.Unsqueeze(op.Mul(count, block), [0])
    after_1d = op.Sub(padded_1d, tokens_1d)
    reach_after_1d = op.Add(after_1d, reach_1d)
    numbers = op.Range(0, count, 1)
    real = op.Cast(token_mask, to=DataType.BOOL)
    around_keys = op.Concat([0], reach_1d, [0], reach_after_1d, axis=0)
    padded_key_bias = op.Pad(op.Where(real, 0.0, MASKED), around_keys, MASKED)
    span_numbers = op.Range(0, span, 1)
    # Row 0 of the padded table is for keys on the left of a window, the last row for keys on the right.
    steps = op.Sub(span_numbers, column(op, block))
    distance_rows = op.Add(steps, op.Sub(radius, reach))
    rows = op.Add(op.Min(op.Max(distance_rows, -1), 2 * radius + 1), 1)
    table = op.Pad(upcast(op, local_bias), [0, 1, 0, 1], MASKED)
    return _Blocks(
        tokens_1d=tokens_1d,
        last_token=last_token,
        block=block,
        block_1d=block_1d,
        reach=reach,
        reach_1d=reach_1d,
        span_1d=op.Unsqueeze(span, [0]),
        count_1d=op.Unsqueeze(count, [0]),
        numbers=numbers,
        starts=op.Mul(numbers, block),
        padded_1d=padded_1d,
        after_1d=after_1d,
        reach_after_1d=reach_after_1d,
        span_numbers=span_numbers,
        real=real,
        padded_key_bias=padded_key_bias,
        span_bias=op.Gather(table, rows, axis=1),
    )


def _real_rows(op: OpBuilder, blocks: _Blocks, padded: Value) -> Value:
    """Turn [batch, heads, padded, head_dim] into [batch, heads, tokens, head_dim], with 0 for padding."""
    rows = op.Slice(padded, [0], blocks.tokens_1d, [2])
    return rows_or_zero(op, op.Unsqueeze(blocks.real, [1, 3]), rows)


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """The sides of a sequence.

    Attributes:
        count_1d: [1], the number of sides.
        behind_span_1d: [1], the number of keys of a span and sides.
        numbers: [sides], from 0.
        key_bias: [batch, sides], float32, 0 for a side that queries see.
        own: [batch, tokens], the side of each token.
        reach: [], the largest distance between sides with a separate row.
        bias: [heads, 2 * reach + 1], float32, by distance.
    """

    count_1d: Value
    behind_span_1d: Value
    numbers: Value
    key_bias: Value
    own: Value
    reach: Value
    bias: Value


def _sides(op: OpBuilder, blocks: _Blocks, side_bias: Value, side_tokens: int) -> _Sides:
    token_numbers = op.Range(0, op.Squeeze(blocks.tokens_1d), 1)
    is_end = op.Equal(op.Mod(token_numbers, side_tokens), side_tokens - 1)
    whole = op.ReduceSum(op.Cast(op.And(blocks.real, is_end), to=DataType.INT64), [1])  # [batch, 1]
    # A sequence without a whole side has the side 0 for all tokens, and sees none: any row of the table serves.
    own = op.Max(op.Min(op.Div(token_numbers, side_tokens), op.Sub(whole, 1)), 0)
    count = op.Add(op.Div(blocks.last_token, side_tokens), 1)
    count_1d = op.Unsqueeze(count, [0])
    numbers = op.Range(0, count, 1)
    return _Sides(
        count_1d=count_1d,
        behind_span_1d=op.Add(blocks.span_1d, count_1d),
        numbers=numbers,
        key_bias=op.Where(op.Less(numbers, whole), 0.0, MASKED),
        own=own,
        reach=integer_attribute(op, "side_reach"),
        bias=upcast(op, side_bias),
    )


def _rows_of_sides(op: OpBuilder, sides: _Sides, distances: Value) -> Value:
    """Return the rows of the table that belong to distances between sides."""
    return op.Add(op.Min(op.Max(distances, op.Neg(sides.reach)), sides.reach), sides.reach)


def _split_weights(op: OpBuilder, blocks: _Blocks, sides: _Sides, weights: Value) -> tuple[Value, Value]:
    """Split [..., span + sides] into the weights of the span and of the sides."""
    of_span = op.Slice(weights, [0], blocks.span_1d, [-1])
    return of_span, op.Slice(weights, blocks.span_1d, sides.behind_span_1d, [-1])
