"""Relative attention as function bodies of standard ONNX operators, with memory linear in tokens and in keys.

A loop takes one block of queries after another. A block takes the rows of the positions between the distance of its
last query from the first key and the distance of its first query from the last key, so that its scores are [queries,
keys + queries] before they are shifted, and [queries, keys] after that.

The blocks are computed in two variants. In the batched variant, a step takes a block of all heads of all sequences; a
GPU runs it as a batch of products. All blocks at once would be scores of [heads, tokens, keys]. In the blockwise
variant, a step takes a block of one head of one sequence, whose scores fit in a CPU's cache at any batch size. CPU
milliseconds and megabytes of growth on one core of an Intel Xeon, 12 heads of 64; beside it Hugging Face's module of
XLNet in PyTorch, without its projections:

======  ====  ========  ==========  ============
tokens  keys  segments  blockwise   Hugging Face
======  ====  ========  ==========  ============
512     1024  no        31 (24)     191 (132)
512     1024  yes       36 (26)     206 (131)
4096    4608  no        1075 (119)  10837 (3548)
======  ====  ========  ==========  ============
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
    Blocks,
    RowShift,
    attention,
    bshd_body,
    padded_heads,
    query_blocks,
    row_shift,
    rows_or_zero,
    scan_blocks,
    shift_rows,
    steps_of_sequences,
    upcast,
)
from hdplugins.op_builder import OpBuilder, float_attribute, scan


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with ``segment_scores`` among their inputs, or without; all but ``scale`` decide it."""
    causal, reach = attributes["causal"], attributes["reach"]
    suffix = "_causal" * causal + f"_reach{reach}" * bool(reach) + "_segments" * ("segment_scores" in inputs)
    return FunctionBodies(
        suffix=suffix,
        batched=bshd_body(partial(_batched, causal=bool(causal), reach=reach)),
        blockwise=bshd_body(partial(_blockwise, causal=bool(causal), reach=reach), states=1),
    )


def _batched(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_kind: Value,
    positions: Value,
    content_bias: Value,
    position_bias: Value,
    segment_scores: Value | None = None,
    *,
    causal: bool,
    reach: int,
) -> Value:
    blocks = _blocks_to_end(op, query, key_kind, positions, content_bias, position_bias, axes=4)
    distance_bias = _distance_bias(op, blocks, causal=causal, reach=reach)

    def split(rows: Value, heads: list[int], size: Value | list[int]) -> Value:  # [blocks, batch, heads, block, size]
        shape = op.Concat(heads, blocks.count_1d, blocks.block_1d, size, axis=0)
        return op.Transpose(op.Reshape(rows, shape), perm=[2, 0, 1, 3, 4])

    content_blocks, position_blocks = (
        split(rows, [0, 0], blocks.head_dim_1d) for rows in (blocks.content_query, blocks.position_query)
    )
    columns = op.Range(0, op.Squeeze(blocks.width_1d), 1)
    key_bias = op.Unsqueeze(blocks.key_bias, [1, 2])
    kind_blocks = segment_blocks = key_kinds = None
    if segment_scores is not None:
        kinds, scores = _padded_segments(op, blocks, segment_scores)
        kind_blocks, key_kinds = split(kinds, [0, 1], [1]), op.Unsqueeze(key_kind, [1, 2])
        shape = op.Concat([0], blocks.count_1d, blocks.block_1d, blocks.heads_1d, [1], axis=0)
        segment_blocks = op.Transpose(op.Reshape(scores, shape), perm=[1, 0, 3, 2, 4])

    def attend(op: OpBuilder, number: Value, first_row: Value) -> Value:
        block_content = op.Gather(content_blocks, number, axis=0)
        block_position = op.Gather(position_blocks, number, axis=0)
        rows = op.Add(columns, first_row)
        position_columns = op.Transpose(op.Gather(blocks.positions, rows, axis=1), perm=[0, 2, 1])
        by_row = upcast(op, op.MatMul(block_position, position_columns))  # [batch, heads, block, keys + block]
        if distance_bias is not None:
            by_row = op.Add(by_row, op.Gather(distance_bias, rows, axis=0))
        bias = op.Add(shift_rows(op, blocks.shift, by_row, blocks.keys_1d), key_bias)
        if segment_scores is not None:
            is_same = op.Equal(op.Gather(kind_blocks, number, axis=0), key_kinds)
            bias = op.Add(bias, op.Where(is_same, 0.0, op.Gather(segment_blocks, number, axis=0)))
        return attention(op, block_content, key, value, bias, axes=4)

    return op.CastLike(_join(op, blocks, scan_blocks(op, attend, blocks.first_rows)), query)


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_kind: Value,
    positions: Value,
    content_bias: Value,
    position_bias: Value,
    segment_scores: Value | None = None,
    *,
    causal: bool,
    reach: int,
) -> Value:
    blocks = _blocks_to_end(op, upcast(op, query), key_kind, positions, content_bias, position_bias, axes=2)
    distance_bias = _distance_bias(op, blocks, causal=causal, reach=reach)
    num_heads = op.Squeeze(blocks.heads_1d)
    sequences, heads = steps_of_sequences(op, blocks.batch_1d, num_heads)
    blocks_shape = op.Concat([-1], blocks.count_1d, blocks.block_1d, blocks.head_dim_1d, axis=0)
    rows_shape = op.Concat(blocks.padded_1d, blocks.head_dim_1d, axis=0)
    queries = [op.Reshape(rows, blocks_shape) for rows in (blocks.content_query, blocks.position_query)]
    # Keys and values are [batch, keys, heads, head_dim], and their row (sequence * keys + key) * heads + head: a step
    # copies the rows of its head alone.
    key_rows_shape = op.Concat([-1], blocks.head_dim_1d, axis=0)
    keys_and_values = [op.Reshape(upcast(op, state), key_rows_shape) for state in (key, value)]
    row_offsets = op.Mul(op.Range(0, blocks.keys, 1), num_heads)
    sequence_rows = op.Mul(blocks.keys, num_heads)
    kind_blocks = segments = None
    if segment_scores is not None:
        columns_shape = op.Concat([-1], blocks.count_1d, blocks.block_1d, [1], axis=0)
        kinds, scores = _padded_segments(op, blocks, segment_scores)
        kind_blocks = op.Reshape(kinds, columns_shape)
        segments = op.Reshape(op.Transpose(scores, perm=[0, 2, 1]), columns_shape)

    # A step is one head of one sequence, and a step of the inner loop is one block of its queries.
    def attend_head(
        op: OpBuilder,
        sequence: Value,
        head: Value,
        content_queries: Value,
        position_queries: Value,
        head_segments: Value | None,
    ) -> Value:
        head_positions = op.Gather(blocks.positions, head, axis=0)
        key_rows = op.Add(row_offsets, op.Add(op.Mul(sequence, sequence_rows), head))
        head_key, head_value = (op.Gather(state, key_rows, axis=0) for state in keys_and_values)
        sequence_bias = op.Gather(blocks.key_bias, sequence, axis=0)
        sequence_kinds = own_kinds = None
        if head_segments is not None:
            sequence_kinds, own_kinds = (op.Gather(kinds, sequence, axis=0) for kinds in (key_kind, kind_blocks))

        def attend(
            op: OpBuilder,
            first_row: Value,
            block_content: Value,
            block_position: Value,
            block_kind: Value | None,
            block_segments: Value | None,
        ) -> Value:
            begin_1d = op.Unsqueeze(first_row, [0])
            end_1d = op.Add(begin_1d, blocks.width_1d)
            block_positions = op.Slice(head_positions, begin_1d, end_1d, [0])
            row_bias = [] if distance_bias is None else [op.Slice(distance_bias, begin_1d, end_1d, [0])]
            by_row = op.Gemm(block_position, block_positions, *row_bias, transB=1)  # [block, keys + block]
            bias = op.Add(shift_rows(op, blocks.shift, by_row, blocks.keys_1d), sequence_bias)
            if block_kind is not None:
                # On a CPU a product is faster than a choice.
                differs = upcast(op, op.Not(op.Equal(block_kind, sequence_kinds)))
                bias = op.Add(bias, op.Mul(differs, block_segments))
            scores = op.Gemm(block_content, head_key, bias, transB=1)
            return op.MatMul(op.Softmax(scores, axis=-1), head_value)

        scan_inputs = blocks.first_rows, content_queries, position_queries, own_kinds, head_segments
        return op.Reshape(scan(op, attend, *scan_inputs, shapes=[("block", "head_dim")]), rows_shape)

    scan_inputs = sequences, heads, *queries, segments
    sums = scan(op, attend_head, *scan_inputs, shapes=[("padded", "head_dim")])
    return op.CastLike(_join(op, blocks, sums), query)


@dataclass(frozen=True, kw_only=True)
class _BlocksToEnd(Blocks):
    """Blocks that end with the last token of a sequence; padding in front fills the first block.

    Attributes:
        missing_1d: [1], the number of queries in front of the sequence.
        content_query: [batch, heads, padded, head_dim], with the bias of contents, scaled.
        position_query: [batch, heads, padded, head_dim], with the bias of positions, scaled.
        keys: [], the number of keys.
        keys_1d: the number of keys as [1].
        width_1d: [1], the number of rows of the positions that a block takes: keys + block.
        positions: [heads, padded + keys, head_dim], by distance.
        first_rows: [blocks], the first row of `positions` that each block takes.
        shift: the shift of scores from rows of positions to keys.
        key_bias: [batch, keys], float32, 0 for real keys.
        own_kind: [batch, tokens], the kinds of the tokens of the sequence, without the cached tokens.
    """

    missing_1d: Value
    content_query: Value
    position_query: Value
    keys: Value
    keys_1d: Value
    width_1d: Value
    positions: Value
    first_rows: Value
    shift: RowShift
    key_bias: Value
    own_kind: Value


def _blocks_to_end(
    op: OpBuilder,
    query: Value,
    key_kind: Value,
    positions: Value,
    content_bias: Value,
    position_bias: Value,
    *,
    axes: int,
) -> _BlocksToEnd:
    """Cut the queries into blocks; scores have that number of axes. With 4 axes, the size of blocks is fixed."""
    blocks = query_blocks(op, query, is_fixed=axes == 4)
    scale = op.CastLike(float_attribute(op, "scale"), query)
    missing_1d = op.Sub(blocks.padded_1d, blocks.tokens_1d)
    keys_1d = op.Shape(key_kind, start=1, end=2)
    blocks_after = op.Sub(op.Sub(blocks.count, 1), op.Range(0, blocks.count, 1))
    padded_query = op.Pad(query, op.Concat([0, 0], missing_1d, [0, 0, 0, 0, 0], axis=0))
    content_query, position_query = (
        op.Mul(op.Add(padded_query, op.CastLike(op.Unsqueeze(bias, [1]), query)), scale)
        for bias in (content_bias, position_bias)
    )
    width_1d = op.Add(keys_1d, blocks.block_1d)
    rows_1d = op.Add(keys_1d, blocks.padded_1d)
    used_positions = op.Slice(positions, [0], rows_1d, [1])
    missing_rows_1d = op.Sub(rows_1d, op.Shape(used_positions, start=1, end=2))
    after_rows = op.Concat([0, 0, 0, 0], missing_rows_1d, [0], axis=0)
    return _BlocksToEnd(
        **vars(blocks),
        missing_1d=missing_1d,
        content_query=content_query,
        position_query=position_query,
        keys=op.Squeeze(keys_1d),
        keys_1d=keys_1d,
        width_1d=width_1d,
        positions=op.Pad(op.CastLike(used_positions, query), after_rows),
        first_rows=op.Mul(blocks_after, blocks.block),
        shift=row_shift(op, blocks.block_1d, width_1d, axes=axes),
        key_bias=op.Where(op.Cast(key_kind, to=DataType.BOOL), 0.0, MASKED),
        own_kind=op.Slice(key_kind, op.Sub(keys_1d, blocks.tokens_1d), keys_1d, [1]),
    )


def _distance_bias(op: OpBuilder, blocks: _BlocksToEnd, *, causal: bool, reach: int) -> Value | None:
    """The bias of each row of the positions, [padded + keys], float32; None if queries see all distances.

    Queries see distances below the reach, or all for 0, and, if attention is causal, no key after them.
    """
    if not causal and not reach:
        return None
    rows = op.Range(0, op.Add(blocks.keys, op.Squeeze(blocks.padded_1d)), 1)
    # The row of distance 0 is keys - 1.
    is_far = op.Less(rows, op.Sub(blocks.keys, reach)) if reach else None
    is_hidden = op.GreaterOrEqual(rows, blocks.keys) if causal else is_far
    if causal and reach:
        is_hidden = op.Or(is_hidden, is_far)
    return op.Where(is_hidden, MASKED, 0.0)


def _padded_segments(op: OpBuilder, blocks: _BlocksToEnd, segment_scores: Value) -> tuple[Value, Value]:
    """Return the kinds of the queries, [batch, padded], and scaled scores, [batch, padded, heads], float32."""
    kinds = op.Pad(blocks.own_kind, op.Concat([0], blocks.missing_1d, [0, 0], axis=0))
    scaled_scores = op.Mul(upcast(op, segment_scores), float_attribute(op, "scale"))
    return kinds, op.Pad(scaled_scores, op.Concat([0], blocks.missing_1d, [0, 0, 0, 0], axis=0))


def _join(op: OpBuilder, blocks: _BlocksToEnd, sums: Value) -> Value:
    """Turn float32 sums of heads and blocks into [batch, heads, tokens, head_dim], with 0 for padding."""
    rows = op.Slice(padded_heads(op, blocks, sums), blocks.missing_1d, blocks.padded_1d, [2])
    real = op.Unsqueeze(op.Cast(blocks.own_kind, to=DataType.BOOL), [1, 3])
    return rows_or_zero(op, real, rows)
