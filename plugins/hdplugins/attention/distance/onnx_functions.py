"""Attention with a relative position bias as function bodies of standard ONNX operators, with memory linear in tokens.

A loop takes one block of queries after another. The band of a block holds the keys that one of its queries sees at a
distance of at most the reach, and the keys between them. The first key of the band is at -reach or farther for every
query, the last key at the reach or farther, so keys before and after the band have the terms of its edges.

By distance, a block has `width` columns, from the distance of the first key of the band to the last query, up to the
distance of the last key to the first query. A shift of each row turns the bias by distance into the bias by key. With
values by distance, the weights of the band are shifted back, and multiplied with the table.

The blocks are computed in two variants. In the batched variant, a step takes a block of all heads of all sequences; a
GPU runs it as a batch of products. In the blockwise variant, a step takes a block of one head of one sequence, whose
scores fit in a CPU's cache at any batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx_ir import Value

from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import (
    Blocks,
    RowShift,
    blocks_from_start,
    bshd_body,
    column,
    join_blocks,
    row_shift,
    scan_blocks,
    scan_heads,
    shift_rows,
    split_by_block,
    upcast,
)
from hdplugins.op_builder import OpBuilder, integer_attribute, scan


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with ``values_by_distance`` among their inputs, or without."""
    return FunctionBodies(
        suffix="_values" * ("values_by_distance" in inputs),
        batched=bshd_body(_batched),
        blockwise=bshd_body(_blockwise),
    )


def _batched(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_mask: Value,
    scores_by_distance: Value,
    values_by_distance: Value | None = None,
) -> Value:
    blocks = blocks_from_start(op, query, key_mask, is_fixed=True)
    bands = _bands(op, blocks, axes=4)
    last_row_1d = _last_row_1d(op, scores_by_distance)
    # One index for the rows of all heads of all queries: gathering the rows of a block puts heads before queries.
    rows_shape = op.Concat([0, -1], op.Shape(scores_by_distance, start=3, end=4), axis=0)
    score_rows = op.Reshape(scores_by_distance, rows_shape)
    head_column = column(op, op.Squeeze(blocks.heads_1d))
    value_rows = near_rows = None
    if values_by_distance is not None:
        value_rows, near_rows = _value_rows(op, bands, blocks, values_by_distance, value)
    query_blocks = split_by_block(op, blocks)
    key_columns = op.Transpose(key, perm=[0, 1, 3, 2])
    key_bias = op.Unsqueeze(blocks.key_bias, [1, 2])
    rows_of_block = op.Range(0, blocks.block, 1)
    keys_from_band = op.Range(bands.reach, op.Add(blocks.tokens, bands.reach), 1)
    last_column_1d = op.Sub(bands.band_1d, [1])
    band_columns = around_weights = None
    if values_by_distance is not None:
        band_columns = op.Range(0, op.Squeeze(bands.band_1d), 1)
        after_1d = op.Add(bands.reach_1d, bands.band_1d)
        around_weights = op.Concat([0, 0, 0], bands.reach_1d, [0, 0, 0], after_1d, axis=0)

    # TensorRT-RTX 1.7.1 builds no Slice and no Pad whose bounds differ from step to step: keys and rows are gathered.
    def attend(op: OpBuilder, number: Value, first_query: Value) -> Value:
        block_query = op.Gather(query_blocks, number, axis=0)
        row_numbers = op.Min(op.Add(rows_of_block, first_query), last_row_1d)
        rows_of_heads = op.Add(op.Mul(row_numbers, blocks.heads_1d), head_column)  # [heads, block]
        scores_by_row = upcast(op, op.Gather(score_rows, rows_of_heads, axis=1))
        by_distance = op.Gather(scores_by_row, bands.rows, axis=3)  # [1 or batch, heads, 1 or block, width]
        band_scores = shift_rows(op, bands.shift, by_distance, bands.band_1d)
        columns = op.Sub(keys_from_band, first_query)
        columns_of_keys = op.Min(op.Max(columns, [0]), last_column_1d)
        by_key = op.Gather(band_scores, columns_of_keys, axis=3)  # [..., block, tokens]
        products = upcast(op, op.MatMul(block_query, key_columns))
        scores = op.Add(op.Add(products, by_key), key_bias)
        weights = op.CastLike(op.Softmax(scores, axis=-1), value)
        if values_by_distance is None:
            return op.MatMul(weights, value)
        last_near_row_1d = op.Add(bands.band_1d, [1])
        rows_of_keys = op.Min(op.Max(op.Add(columns, [1]), [0]), last_near_row_1d)
        key_sums = op.MatMul(weights, op.Add(value, op.Gather(near_rows, rows_of_keys, axis=0)))
        padded_weights = op.Pad(weights, around_weights)
        band_weights = op.Gather(padded_weights, op.Add(band_columns, first_query), axis=3)
        distance_sums = op.MatMul(_shifted_back(op, bands, band_weights), value_rows)
        return op.Add(key_sums, distance_sums)

    return join_blocks(op, blocks, scan_blocks(op, attend, blocks.first_queries), query)


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_mask: Value,
    scores_by_distance: Value,
    values_by_distance: Value | None = None,
) -> Value:
    query32, key32, value32 = (upcast(op, state) for state in (query, key, value))
    blocks = blocks_from_start(op, query32, key_mask, is_fixed=False)
    bands = _bands(op, blocks, axes=2)
    value_rows = near_rows = None
    if values_by_distance is not None:
        value_rows, near_rows = _value_rows(op, bands, blocks, values_by_distance, value32)
    # A bias that all queries share is row 0.
    moves_1d = op.Min(_last_row_1d(op, scores_by_distance), [1])
    after_first_1d = op.Add(blocks.block_1d, bands.reach_1d)
    last_sequence = op.Squeeze(op.Sub(op.Shape(scores_by_distance, end=1), [1]))

    # A step is one head of one sequence, and a step of the inner loop is one block of its queries. A Pad by a negative
    # number truncates the band where the sequence ends. At the edges, a Pad copies values ten times faster than a
    # Gather.
    def attend_head(
        op: OpBuilder, sequence: Value, head: Value, head_queries: Value, head_key: Value, head_value: Value
    ) -> Value:
        sequence_scores = op.Gather(scores_by_distance, op.Min(sequence, last_sequence), axis=0)
        head_scores = op.Gather(sequence_scores, head, axis=1)
        sequence_bias = op.Gather(blocks.key_bias, sequence, axis=0)

        def attend(op: OpBuilder, first_query: Value, block_query: Value) -> Value:
            first_1d = op.Unsqueeze(first_query, [0])
            first_row_1d = op.Mul(first_1d, moves_1d)
            scores_by_row = upcast(op, op.Slice(head_scores, first_row_1d, op.Add(first_row_1d, blocks.block_1d), [0]))
            missing_1d = op.Sub(blocks.block_1d, op.Shape(scores_by_row, end=1))
            around_scores = op.Concat([0], bands.shift.begin_1d, missing_1d, blocks.block_1d, axis=0)
            by_distance = op.Pad(scores_by_row, around_scores, mode="edge")  # [block, width]
            band_scores = shift_rows(op, bands.shift, by_distance, bands.band_1d)
            before_1d = op.Sub(first_1d, bands.reach_1d)
            after_1d = op.Sub(op.Sub(blocks.tokens_1d, first_1d), after_first_1d)
            by_key = op.Pad(band_scores, op.Concat([0], before_1d, [0], after_1d, axis=0), mode="edge")
            scores = op.Gemm(block_query, head_key, op.Add(by_key, sequence_bias), transB=1)
            weights = op.Softmax(scores, axis=-1)
            if values_by_distance is None:
                return op.MatMul(weights, head_value)
            around_rows = op.Concat(op.Sub(before_1d, [1]), [0], op.Sub(after_1d, [1]), [0], axis=0)
            far_rows = op.Pad(near_rows, around_rows, mode="edge")
            key_sums = op.MatMul(weights, op.Add(head_value, far_rows))
            truncation = op.Concat([0], op.Neg(before_1d), [0], op.Neg(after_1d), axis=0)
            shares = _shifted_back(op, bands, op.Pad(weights, truncation))
            return op.Gemm(shares, value_rows, key_sums)

        return scan(op, attend, blocks.first_queries, head_queries, shapes=[("block", "head_dim")])

    return join_blocks(op, blocks, scan_heads(op, blocks, attend_head, key32, value32), query)


@dataclass(frozen=True, kw_only=True)
class _Bands:
    """The sizes of the bands of blocks, which are equal for all blocks.

    Attributes:
        reach: [], the largest distance with a separate row.
        reach_1d: the reach as [1].
        block_1d: [1], the number of queries of a block.
        band_1d: [1], the number of keys of a band.
        width_1d: [1], the number of columns by distance.
        shift: the shift from distances to keys.
        rows: [width], the row of a table by distance for each column.
    """

    reach: Value
    reach_1d: Value
    block_1d: Value
    band_1d: Value
    width_1d: Value
    shift: RowShift
    rows: Value


def _bands(op: OpBuilder, blocks: Blocks, *, axes: int) -> _Bands:
    """Compute the sizes; `axes` is the number of axes of the values that are shifted."""
    reach = integer_attribute(op, "reach")
    reach_1d = op.Unsqueeze(reach, [0])
    twice_reach_1d = op.Add(reach_1d, reach_1d)
    band_1d = op.Add(blocks.block_1d, twice_reach_1d)
    width_1d = op.Add(band_1d, blocks.block_1d)
    shift = row_shift(op, blocks.block_1d, width_1d, axes=axes)
    columns = op.Sub(op.Range(0, op.Squeeze(width_1d), 1), shift.begin_1d)
    return _Bands(
        reach=reach,
        reach_1d=reach_1d,
        block_1d=blocks.block_1d,
        band_1d=band_1d,
        width_1d=width_1d,
        shift=shift,
        rows=op.Min(op.Max(columns, [0]), twice_reach_1d),
    )


def _last_row_1d(op: OpBuilder, scores_by_distance: Value) -> Value:
    """Return the last row of the scores, [1]: 0 where all queries share the scores."""
    return op.Sub(op.Shape(scores_by_distance, start=1, end=2), [1])


def _shifted_back(op: OpBuilder, bands: _Bands, by_key: Value) -> Value:
    """Turn weights, [..., block, band], into [..., block, width]: 0 where a distance has no key."""
    shift = bands.shift
    leading, zeros = [[0]] * (shift.axes - 2), [0] * (2 * shift.axes - 1)
    rows = op.Pad(by_key, op.Concat(zeros, shift.begin_1d, axis=0))
    flat = op.Reshape(rows, [0] * (shift.axes - 2) + [-1])
    around = op.Pad(flat, op.Concat(*leading, shift.begin_1d, *leading, [1], axis=0))
    return op.Reshape(around, op.Concat(*leading, bands.block_1d, bands.width_1d, axis=0))


def _value_rows(
    op: OpBuilder, bands: _Bands, blocks: Blocks, values_by_distance: Value, value: Value
) -> tuple[Value, Value]:
    """Rows that are added to values, in the element type of the values.

    They are the rows by distance, [width, head_dim], and [1 + band + 1, head_dim]: the row of keys before the band, 0
    in the band, the row of keys after it.
    """
    table = op.CastLike(values_by_distance, value)
    rows = op.Gather(table, bands.rows, axis=0)
    first_row = op.Gather(table, [0], axis=0)
    last_row = op.Gather(table, op.Add(bands.reach_1d, bands.reach_1d), axis=0)
    nothing = op.Expand(op.CastLike(0.0, value), op.Concat(bands.band_1d, blocks.head_dim_1d, axis=0))
    return rows, op.Concat(first_row, nothing, last_row, axis=0)
