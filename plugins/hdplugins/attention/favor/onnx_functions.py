"""FAVOR+ as function bodies of standard ONNX operators, with time and memory linear in tokens.

In the batched variant, all heads of all sequences are one batch of products, which engines fuse; their features are in
memory at once, [batch, heads, tokens, features]. In the blockwise variant, for a CPU, a loop takes one head of one
sequence after another, and an inner loop one chunk of tokens after another: keys and values are summed up with an
online maximum, then the queries read the sums. All of it is float32 whatever the type of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from onnx_ir import DataType, Value

from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import (
    MASKED,
    bshd_body,
    sequence_sizes,
    state_rows,
    steps_of_sequences,
    transpose_heads_and_tokens,
    upcast,
)
from hdplugins.op_builder import OpBuilder, float_attribute, scan

CHUNK_TOKENS = 256
"""The tokens of a chunk: with 256 features in float32, the features take 256 kB, which a CPU's cache holds."""


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with these attributes; ``compat`` decides the body."""
    compat = bool(attributes["compat"])
    return FunctionBodies(
        suffix="_compat" * compat,
        batched=bshd_body(partial(_batched, compat=compat)),
        blockwise=partial(_blockwise, compat=compat),
    )


def _batched(
    op: OpBuilder, query: Value, key: Value, value: Value, key_mask: Value, projection: Value, *, compat: bool
) -> Value:
    """Compute the attention; with `compat`, keys of padding count, with 0 for their values."""
    epsilon, root_scale = float_attribute(op, "epsilon"), op.Sqrt(float_attribute(op, "scale"))
    directions = op.Transpose(upcast(op, projection), perm=[1, 0])
    real = op.Unsqueeze(key_mask, [1, 3])
    seen_value = upcast(op, value)

    products, half_squares = _exponents(op, upcast(op, query), root_scale, directions)
    offset = op.Add(half_squares, op.ReduceMax(products, [-1]))
    query_features = op.Add(op.Exp(op.Sub(products, offset)), epsilon)

    products, half_squares = _exponents(op, upcast(op, key), root_scale, directions)
    if not compat:
        # Without it, the exponentials of padding may be infinite, also where all of a sequence is padding.
        products = op.Where(real, products, MASKED)
    offset = op.Add(half_squares, op.ReduceMax(products, [2, 3]))
    key_features = op.Add(op.Exp(op.Sub(products, offset)), epsilon)
    if compat:
        seen_value = op.Where(real, seen_value, 0.0)
    else:
        key_features = op.Where(real, key_features, 0.0)

    sums = op.MatMul(op.Transpose(key_features, perm=[0, 1, 3, 2]), seen_value)  # [batch, heads, features, head_dim]
    counts = op.Transpose(op.ReduceSum(key_features, [2]), perm=[0, 1, 3, 2])  # [batch, heads, features, 1]
    quotients = op.Div(op.MatMul(query_features, sums), op.MatMul(query_features, counts))
    has_keys = op.Cast(op.ReduceMax(upcast(op, real), [2]), to=DataType.BOOL)
    # Without keys, the quotient is 0 / 0.
    return op.CastLike(op.Where(has_keys, quotients, 0.0), query)


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    key_mask: Value,
    projection: Value,
    *,
    compat: bool,
) -> Value:
    """Compute the attention; with `compat`, keys of padding count, with 0 for their values."""
    epsilon, root_scale = float_attribute(op, "epsilon"), op.Sqrt(float_attribute(op, "scale"))
    directions = op.Transpose(upcast(op, projection), perm=[1, 0])
    sizes = sequence_sizes(op, key_mask)
    features_1d = op.Shape(projection, end=1)

    # The last token fills the last chunk, where it neither counts nor has a value.
    chunk = op.Min(CHUNK_TOKENS, sizes.tokens)
    padded = op.Mul(op.Add(op.Div(sizes.last_token, chunk), 1), chunk)
    chunk_1d, padded_1d = op.Unsqueeze(chunk, [0]), op.Unsqueeze(padded, [0])
    positions = op.Range(0, padded, 1)
    clipped_positions, is_token = op.Min(positions, sizes.last_token), op.Less(positions, sizes.tokens)
    real = op.And(op.Gather(key_mask, clipped_positions, axis=1), is_token)  # [batch, padded]
    counted = op.Expand(is_token, op.Concat(sizes.batch_1d, padded_1d, axis=0)) if compat else real
    real_columns, counted_columns = op.Unsqueeze(real, [-1]), op.Unsqueeze(counted, [-1])
    count_columns = op.Where(counted_columns, 1.0, 0.0)
    bias_columns = op.Where(counted_columns, 0.0, MASKED)

    # A step takes the rows of its head, and nothing is transposed.
    rows = state_rows(op, sizes.tokens, *(upcast(op, state) for state in (query, key, value)))
    sequences, heads = steps_of_sequences(op, sizes.batch_1d, rows.num_heads)
    first_rows = op.Add(op.Mul(sequences, rows.sequence_rows), heads)
    row_offsets = op.Mul(clipped_positions, rows.num_heads)
    chunks_shape = op.Concat([-1], chunk_1d, rows.head_dim_1d, axis=0)
    width_1d = op.Add(rows.head_dim_1d, [1])
    wide_chunks_shape = op.Concat([-1], chunk_1d, width_1d, axis=0)
    columns_shape = op.Concat([-1], chunk_1d, [1], axis=0)
    split_sizes = op.Concat(rows.head_dim_1d, [1], axis=0)
    no_sums = op.Expand(0.0, op.Concat(features_1d, width_1d, axis=0))
    lowest = op.Expand(MASKED, [1, 1])

    # A step is a head of a sequence, and a step of an inner loop a chunk. Sums of earlier chunks fade where a later
    # chunk has a higher product. The sums have a last column, of counts. `epsilon` is added to every feature, so it
    # adds the sum of the values to each.
    def attend_head(op: OpBuilder, sequence: Value, first_row: Value) -> Value:
        head_rows = op.Add(row_offsets, first_row)
        head_query, head_key, head_value = (op.Gather(state, head_rows, axis=0) for state in rows.states)
        seen_value = op.Where(op.Gather(real_columns, sequence, axis=0), head_value, 0.0)
        value_and_count = op.Concat(seen_value, op.Gather(count_columns, sequence, axis=0), axis=1)
        query_chunks, key_chunks = (op.Reshape(state, chunks_shape) for state in (head_query, head_key))
        value_chunks = op.Reshape(value_and_count, wide_chunks_shape)
        bias_chunks = op.Reshape(op.Gather(bias_columns, sequence, axis=0), columns_shape)

        def sum_up(
            op: OpBuilder, before: Value, sums_before: Value, keys: Value, values: Value, bias: Value
        ) -> tuple[Value, Value]:
            products, half_squares = _exponents(op, keys, root_scale, directions)
            counted_products = op.Add(products, bias)
            highest = op.Max(before, op.ReduceMax(counted_products))
            exponentials = op.Exp(op.Sub(counted_products, op.Add(half_squares, highest)))
            faded_sums = op.Mul(sums_before, op.Exp(op.Sub(before, highest)))
            return highest, op.Gemm(exponentials, values, faded_sums, transA=1)

        def attend(op: OpBuilder, queries: Value) -> Value:
            products, half_squares = _exponents(op, queries, root_scale, directions)
            offset = op.Add(half_squares, op.ReduceMax(products, [-1]))
            query_features = op.Add(op.Exp(op.Sub(products, offset)), epsilon)
            weighted = op.MatMul(query_features, feature_sums)
            return op.Div(*op.Split(weighted, split_sizes, axis=1, _outputs=2))

        _, exponential_sums = scan(op, sum_up, key_chunks, value_chunks, bias_chunks, states=[lowest, no_sums])
        least_sum = op.Mul(op.ReduceSum(value_and_count, [0]), epsilon)
        feature_sums = op.Add(exponential_sums, least_sum)  # [features, head_dim + 1]
        chunks = scan(op, attend, query_chunks, shapes=[("chunk", "head_dim")])
        return op.Slice(op.Reshape(chunks, rows.shape), [0], sizes.tokens_1d)

    scanned = scan(op, attend_head, sequences, first_rows, shapes=[("tokens", "head_dim")])
    heads_shape = op.Concat(sizes.batch_1d, rows.heads_1d, sizes.tokens_1d, rows.head_dim_1d, axis=0)
    by_head = op.Reshape(scanned, heads_shape)
    most_real = op.ReduceMax(upcast(op, key_mask), [1], keepdims=0)
    has_keys = op.Unsqueeze(op.Cast(most_real, to=DataType.BOOL), [1, 2, 3])
    attended = op.CastLike(op.Where(has_keys, by_head, 0.0), query)
    return transpose_heads_and_tokens(op, attended)


def _exponents(op: OpBuilder, rows: Value, root_scale: Value, directions: Value) -> tuple[Value, Value]:
    """Return the products with the directions, [..., rows, features], and half the squares of rows, [..., rows, 1]."""
    scaled = op.Mul(rows, root_scale)
    return op.MatMul(scaled, directions), op.Mul(op.ReduceSumSquare(scaled, [-1]), 0.5)
