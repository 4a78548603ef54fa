"""Disentangled attention as function bodies of standard ONNX operators, with memory linear in tokens.

The products of the keys with the rows of their table are computed once, [..., rows, tokens]. A loop then takes one
block of queries after another. It multiplies the block with the rows of the other table, [..., block, rows], and
gathers the terms of each distance from both products.

The blocks are computed in two variants. In the batched variant, a step takes a block of all heads of all sequences; a
GPU runs it as a batch of products. In the blockwise variant, a step takes a block of one head of one sequence. It
gathers only for the keys around the block, and farther keys share one term per query and one term per key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx_ir import DataType, Value

from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import (
    blocks_from_start,
    bshd_body,
    column,
    join_blocks,
    scan_blocks,
    scan_heads,
    split_by_block,
    upcast,
)
from hdplugins.op_builder import OpBuilder, integer_attribute, scan


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies that serve every node: they read the attributes from it."""
    return FunctionBodies(batched=bshd_body(_batched), blockwise=bshd_body(_blockwise))


def _batched(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_mask: Value,
    position_keys: Value,
    position_queries: Value,
    row_of_distance: Value,
) -> Value:
    blocks = blocks_from_start(op, query, key_mask, is_fixed=True)
    query_blocks = split_by_block(op, blocks)
    key_columns = op.Transpose(key, perm=[0, 1, 3, 2])
    position_columns = op.Transpose(position_keys, perm=[0, 2, 1])
    of_keys = op.MatMul(op.Mul(position_queries, blocks.scale), key_columns)  # [batch, heads, rows, tokens]
    key_bias = op.Unsqueeze(blocks.key_bias, [1, 2])
    distances_of_first = op.Sub(op.Range(0, blocks.tokens, 1), column(op, blocks.block))  # [block, tokens]
    scores_shape = op.Concat(blocks.batch_1d, blocks.heads_1d, blocks.block_1d, blocks.tokens_1d, axis=0)
    reach, int32_rows = integer_attribute(op, "reach"), _int32_rows(op, row_of_distance)

    def attend(op: OpBuilder, number: Value, first_query: Value) -> Value:
        block_query = op.Gather(query_blocks, number, axis=0)
        distances = op.Sub(distances_of_first, first_query)
        rows = op.Expand(_rows_of_distances(op, int32_rows, reach, distances), scores_shape)
        of_queries = op.MatMul(block_query, position_columns)  # [batch, heads, block, rows]
        to_positions = upcast(op, op.GatherElements(of_queries, rows, axis=3))  # [batch, heads, block, tokens]
        from_positions = upcast(op, op.GatherElements(of_keys, rows, axis=2))
        products = upcast(op, op.MatMul(block_query, key_columns))
        scores = op.Add(products, op.Add(to_positions, from_positions))
        weights = op.Softmax(op.Add(scores, key_bias), axis=-1)
        return op.MatMul(op.CastLike(weights, value), value)

    return join_blocks(op, blocks, scan_blocks(op, attend, blocks.first_queries), query)


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_mask: Value,
    position_keys: Value,
    position_queries: Value,
    row_of_distance: Value,
) -> Value:
    query32, key32, value32 = (upcast(op, state) for state in (query, key, value))
    blocks = blocks_from_start(op, query32, key_mask, is_fixed=False)
    position_keys32 = upcast(op, position_keys)
    scaled_position_queries = op.Mul(upcast(op, position_queries), blocks.scale)
    reach, int32_rows = integer_attribute(op, "reach"), _int32_rows(op, row_of_distance)
    first_row, last_row = (op.Gather(row_of_distance, [end], axis=0) for end in (0, -1))

    # The band of a block holds the keys within reach of any of its queries. Column c of the band is the key that lies
    # c - near tokens after the block's first query, so all blocks share the rows of the distances.
    near = op.Min(reach, blocks.tokens)
    near_1d = op.Unsqueeze(near, [0])
    columns = op.Range(0, op.Add(blocks.block, op.Add(near, near)), 1)
    band_distances = op.Sub(op.Sub(columns, column(op, blocks.block)), near)
    band_rows = _rows_of_distances(op, int32_rows, reach, band_distances)  # [block, band]
    block_and_near_1d = op.Add(blocks.block_1d, near_1d)

    # A step is one head of one sequence, and a step of the inner loop is one block of its queries. The products of the
    # keys include the mask, so that it is added once per head.
    def attend_head(
        op: OpBuilder, sequence: Value, head: Value, head_queries: Value, head_key: Value, head_value: Value
    ) -> Value:
        sequence_bias = op.Gather(blocks.key_bias, sequence, axis=0)
        head_position_keys = op.Gather(position_keys32, head, axis=0)
        head_position_queries = op.Gather(scaled_position_queries, head, axis=0)
        of_keys = op.Gemm(head_position_queries, head_key, sequence_bias, transB=1)  # [rows, tokens]
        of_keys_before = op.Gather(of_keys, first_row, axis=0)
        of_keys_after = op.Gather(of_keys, last_row, axis=0)

        def attend(op: OpBuilder, first_query: Value, block_query: Value) -> Value:
            first_1d = op.Unsqueeze(first_query, [0])
            band_begin = op.Sub(first_1d, near_1d)
            begin = op.Max(band_begin, [0])
            end = op.Min(op.Add(first_1d, block_and_near_1d), blocks.tokens_1d)
            rows = op.Slice(band_rows, op.Sub(begin, band_begin), op.Sub(end, band_begin), [1])
            of_queries = op.Gemm(block_query, head_position_keys, transB=1)  # [block, rows]
            to_positions = op.GatherElements(of_queries, rows, axis=1)
            from_positions = op.GatherElements(op.Slice(of_keys, begin, end, [1]), rows, axis=0)
            here = op.Add(to_positions, from_positions)
            keys_before = op.Slice(of_keys_before, [0], begin, [1])
            before = op.Add(op.Gather(of_queries, first_row, axis=1), keys_before)
            keys_after = op.Slice(of_keys_after, end, blocks.tokens_1d, [1])
            after = op.Add(op.Gather(of_queries, last_row, axis=1), keys_after)
            scores = op.Gemm(block_query, head_key, op.Concat(before, here, after, axis=1), transB=1)
            return op.Gemm(op.Softmax(scores, axis=-1), head_value)

        return scan(op, attend, blocks.first_queries, head_queries, shapes=[("block", "head_dim")])

    return join_blocks(op, blocks, scan_heads(op, blocks, attend_head, key32, value32), query)


def _int32_rows(op: OpBuilder, row_of_distance: Value) -> Value:
    """Cast the rows to int32, which takes half the memory of int64."""
    return op.Cast(row_of_distance, to=DataType.INT32)


def _rows_of_distances(op: OpBuilder, int32_rows: Value, reach: Value, distances: Value) -> Value:
    """Return the rows of the tables that belong to distances, in the shape of `distances`."""
    clipped = op.Min(op.Max(distances, op.Neg(reach)), reach)
    return op.Gather(int32_rows, op.Add(clipped, reach), axis=0)
