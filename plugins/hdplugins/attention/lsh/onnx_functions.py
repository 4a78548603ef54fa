"""LSH attention as function bodies of standard ONNX operators, with memory linear in tokens.

Tokens are hashed and sorted, and each chunk of sorted tokens meets the chunks that it sees: scores are [..., chunk,
span], never [tokens, tokens]. Rows of queries, keys and values are gathered by the sorted positions, and the results of
all rounds by the ranks of the positions. Hashes, sums and weights are float32 whatever the dtype.

The chunks are computed in two variants. In the batched variant, the chunks of all rounds, heads and sequences are one
batch of products, which engines fuse, and the sort counts: an engine's TopK takes 3840 numbers at most. In the
blockwise variant, a loop takes one head of one sequence after another, and an inner loop groups of chunks whose scores
fit in a CPU's cache; the sort is a TopK of all tokens, which ONNX Runtime takes at any length. CPU milliseconds and
megabytes of growth on one core of an Intel Xeon, 12 heads of 64, chunks of 64 that see one before, 16 x 32 buckets;
beside it Hugging Face's module in PyTorch, without its projections, called in turn:

======  ======  ==========  ============
tokens  rounds  blockwise   Hugging Face
======  ======  ==========  ============
4096    1       57 (28)     136 (232)
4096    4       181 (53)    962 (643)
16384   1       272 (185)   1021 (623)
16384   2       480 (198)   2107 (1163)
16384   4       923 (277)   4060 (2303)
======  ======  ==========  ============

A quarter of the time of the blockwise variant goes to the two products, a twelfth to the sort.

The value by which a body sorts is called `sorting`, in the body or in its loop: verification reads a graph's hashes
there.

Everything but the states comes from `token_mask`, not from the shapes of the states: ONNX Runtime sees then that all
layers of a model need equal tables, and computes them once in the batched variant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from onnx_ir import DataType, Value

from hdplugins.attention.chunks.onnx_functions import causal_bias, chunk_tables
from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import (
    biased_scores,
    bshd_body,
    rows_or_zero,
    state_rows,
    steps_of_sequences,
    transpose_heads_and_tokens,
    upcast,
)
from hdplugins.op_builder import OpBuilder, float_attribute, scan

_EPSILON = 1.0e-6
_GROUP_TOKENS = 512
"""The queries of a step: their scores stay in a CPU's cache. With 256 to 1024 the time hardly differs."""
_SELF_SCORE = -1.0e15
"""The score of a query's own key. A query that sees no other key in any round sees its own: beside any other score,
exp() of this one is exactly 0."""


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with these attributes; all attributes but ``scale`` decide the body."""
    buckets, rounds = attributes["buckets"], attributes["rounds"]
    suffix = "_chunk{chunk}_before{before}_after{after}_of{multiple}".format(**attributes)
    suffix += f"_rounds{rounds}_buckets{'x'.join(map(str, buckets))}"
    suffix += "_causal" * bool(attributes["causal"]) + "_byrow" * bool(attributes["ends_by_row"])
    return FunctionBodies(
        suffix=suffix,
        batched=bshd_body(partial(_batched, attributes=attributes), states=2),
        blockwise=partial(_blockwise, attributes=attributes),
    )


def _batched(
    op: OpBuilder, query_key: Value, value: Value, token_mask: Value, rotations: Value, *, attributes: Mapping[str, Any]
) -> Value:
    chunk, buckets, rounds = (attributes[name] for name in ("chunk", "buckets", "rounds"))
    tables = chunk_tables(op, token_mask, attributes)
    scale = op.CastLike(float_attribute(op, "scale"), query_key)
    query32 = upcast(op, query_key)
    key = op.CastLike(op.Div(query32, _length(op, query32)), query_key)
    batch_and_heads, head_dim_1d = op.Shape(query_key, end=2), op.Shape(query_key, start=3)
    rows_shape = op.Concat([-1], head_dim_1d, axis=0)
    all_queries, all_keys, all_values = (
        op.Reshape(state, rows_shape) for state in (op.Mul(query_key, scale), key, value)
    )

    bucket = _buckets(op, query32, _directions(op, rotations, buckets, rounds), buckets, rounds, axes=4)
    padding = op.Concat([0] * 7, tables.missing_1d, axis=0)
    padded_buckets = op.Pad(op.Transpose(bucket, perm=[0, 1, 3, 2]), padding)  # [batch, heads, rounds, padded]
    is_real = op.Unsqueeze(op.Equal(tables.padded_bias, 0.0), [1, 2])
    last_bucket = math.prod(buckets)
    sorting_shape = op.Concat([-1], tables.padded_1d, axis=0)
    sorting = op.Reshape(op.Where(is_real, padded_buckets, last_bucket), sorting_shape, _outputs=["sorting"])
    rank, order = counting_sort(op, sorting, tables.positions, tables.padded, most=last_bucket)

    # One index for the rows of tokens, and one for chunks, over all heads of all sequences.
    batch = op.Squeeze(tables.batch_1d)
    all_heads = op.Mul(batch, op.Squeeze(op.Shape(query_key, start=1, end=2)))
    heads = op.Reshape(op.Range(0, all_heads, 1), op.Concat(batch_and_heads, [1, 1], axis=0))
    seen_chunks = op.Add(op.Mul(heads, tables.all_chunks), op.Unsqueeze(tables.seen, [1]))
    key_chunks = op.Gather(op.Reshape(order, [-1, chunk]), seen_chunks, axis=0)
    key_positions = op.Reshape(key_chunks, [0, 0, 0, -1])  # [batch, heads, chunks of all rounds, span]
    query_positions = op.Reshape(
        order, op.Concat(batch_and_heads, op.Unsqueeze(tables.all_chunks, [0]), [chunk], axis=0)
    )  # [batch, heads, chunks of all rounds, chunk]
    row_starts = op.Mul(heads, tables.tokens)
    query_rows, key_rows = (
        op.Add(row_starts, op.Min(positions, tables.last_token)) for positions in (query_positions, key_positions)
    )
    block_query = op.Gather(all_queries, query_rows, axis=0)
    block_key, block_value = (op.Gather(rows, key_rows, axis=0) for rows in (all_keys, all_values))
    sequence_starts = op.Unsqueeze(op.Mul(op.Range(0, batch, 1), tables.padded), [1, 2, 3])
    key_bias = op.Gather(op.Reshape(tables.padded_bias, [-1]), op.Add(sequence_starts, key_positions), axis=0)
    bias = _bias(op, query_positions, key_positions, key_bias, causal=attributes["causal"])
    scores = biased_scores(op, block_query, block_key, bias, axes=5)
    weights = op.Softmax(scores, axis=-1)
    sums = op.MatMul(op.CastLike(weights, value), block_value)

    rank_starts = op.Unsqueeze(op.Mul(op.Range(0, op.Mul(all_heads, rounds), 1), tables.padded), [1])
    sorted_rows = op.Slice(op.Add(rank, rank_starts), [0], tables.tokens_1d, [1])  # [batch * heads * rounds, tokens]
    round_sums = op.Gather(op.Reshape(sums, rows_shape), sorted_rows, axis=0)
    if rounds > 1:
        round_log_sums = op.Gather(op.Reshape(_log_sums(op, scores, weights), [-1]), sorted_rows, axis=0)
        rounds_shape = op.Concat(batch_and_heads, [rounds], tables.tokens_1d, axis=0)
        round_weights = op.Unsqueeze(op.Softmax(op.Reshape(round_log_sums, rounds_shape), axis=2), [-1])
        shares = upcast(op, op.Reshape(round_sums, op.Concat(rounds_shape, head_dim_1d, axis=0)))
        joined = op.CastLike(op.ReduceSum(op.Mul(shares, round_weights), [2], keepdims=0), query_key)
    else:
        joined = op.Reshape(round_sums, op.Shape(query_key))
    return rows_or_zero(op, op.Unsqueeze(tables.real, [1, 3]), joined)


def _blockwise(
    op: OpBuilder,
    query_key: Value,
    value: Value,
    token_mask: Value,
    rotations: Value,
    *,
    attributes: Mapping[str, Any],
) -> Value:
    chunk, buckets, rounds = (attributes[name] for name in ("chunk", "buckets", "rounds"))
    tables = chunk_tables(op, token_mask, attributes)
    scale = float_attribute(op, "scale")
    directions = _directions(op, rotations, buckets, rounds)

    rows = state_rows(op, tables.tokens, upcast(op, query_key), upcast(op, value))
    sequences, heads = steps_of_sequences(op, tables.batch_1d, rows.num_heads)
    row_offsets = op.Mul(op.Min(tables.positions, tables.last_token), rows.num_heads)

    # A step is a head of a sequence, and a step of the inner loop a group of chunks: the last chunk fills the last
    # group.
    last_table = op.Squeeze(op.Sub(op.Shape(tables.seen, end=1), [1]))
    group = op.Min(max(_GROUP_TOKENS // chunk, 1), tables.all_chunks)
    last_chunk = op.Sub(tables.all_chunks, 1)
    groups = op.Add(op.Div(last_chunk, group), 1)
    chunk_numbers = op.Min(op.Range(0, op.Mul(groups, group), 1), last_chunk)
    grouped_seen = op.Gather(tables.seen, chunk_numbers, axis=1)
    group_1d = op.Unsqueeze(group, [0])
    span = chunk * (attributes["before"] + 1 + attributes["after"])
    query_groups_shape, key_groups_shape = (op.Concat([-1], group_1d, [size], axis=0) for size in (chunk, span))
    position_row = op.Unsqueeze(tables.positions, [0])
    sorting_shape = op.Concat([rounds], tables.padded_1d, axis=0)
    round_positions = op.Expand(position_row, sorting_shape)
    round_offsets = op.Mul(op.Unsqueeze(op.Range(0, rounds, 1), [1]), tables.padded)

    def attend_head(op: OpBuilder, sequence: Value, head: Value) -> Value:
        head_rows = op.Add(row_offsets, op.Add(op.Mul(sequence, rows.sequence_rows), head))
        head_query, head_value = (op.Gather(state, head_rows, axis=0) for state in rows.states)
        head_key = op.Mul(head_query, op.Div(scale, _length(op, head_query)))
        head_bias = op.Gather(tables.padded_bias, sequence, axis=0)
        head_directions = [op.Gather(of_factor, head, axis=0) for of_factor in directions]
        bucket = _buckets(op, head_query, head_directions, buckets, rounds, axes=2)
        is_real = op.Equal(head_bias, 0.0)
        bucket_rounds = op.Transpose(bucket, perm=[1, 0])
        sorting = op.Where(is_real, bucket_rounds, math.prod(buckets), _outputs=["sorting"])  # [rounds, padded]
        unique_sorting = op.Add(op.Mul(sorting, tables.padded), position_row)
        _, order = op.TopK(unique_sorting, tables.padded_1d, largest=0, _outputs=2)
        rank = op.ScatterElements(op.Expand(0, sorting_shape), order, round_positions, axis=1)
        int32_order = op.Cast(order, to=DataType.INT32)
        chunks = op.Reshape(int32_order, [-1, chunk])
        query_groups = op.Reshape(op.Gather(chunks, chunk_numbers, axis=0), query_groups_shape)
        seen = op.Gather(grouped_seen, op.Min(sequence, last_table), axis=0)
        key_groups = op.Reshape(op.Gather(chunks, seen, axis=0), key_groups_shape)

        def attend(op: OpBuilder, query_positions: Value, key_positions: Value) -> tuple[Value, ...]:
            block_query = op.Gather(head_query, query_positions, axis=0)
            block_key, block_value, key_bias = (
                op.Gather(rows, key_positions, axis=0) for rows in (head_key, head_value, head_bias)
            )
            bias = _bias(op, query_positions, key_positions, key_bias, causal=attributes["causal"])
            scores = biased_scores(op, block_query, block_key, bias, axes=3)
            weights = op.Softmax(scores, axis=-1)
            sums = op.MatMul(weights, block_value)
            return (sums, _log_sums(op, scores, weights)) if rounds > 1 else (sums,)

        shapes = [("group", "chunk", "head_dim"), ("group", "chunk", "one")][: 1 + (rounds > 1)]
        scanned = scan(op, attend, query_groups, key_groups, shapes=shapes)
        sums, log_sums = scanned if rounds > 1 else (scanned, None)
        attended_rows = op.Reshape(sums, rows.shape)
        row_numbers = op.Slice(op.Add(rank, round_offsets), [0], tables.tokens_1d, [1])  # [rounds, tokens]
        if rounds > 1:
            token_rows = op.Transpose(row_numbers, perm=[1, 0])
            shares = op.Gather(attended_rows, token_rows, axis=0)
            weights = op.Softmax(op.Gather(op.Reshape(log_sums, [-1]), token_rows, axis=0), axis=-1)
            joined = op.ReduceSum(op.Mul(shares, op.Unsqueeze(weights, [-1])), [1], keepdims=0)
        else:
            joined = op.Gather(attended_rows, op.Reshape(row_numbers, [-1]), axis=0)
        return rows_or_zero(op, op.Unsqueeze(op.Gather(tables.real, sequence, axis=0), [1]), joined)

    scanned = scan(op, attend_head, sequences, heads, shapes=[("tokens", "head_dim")])
    heads_shape = op.Concat(tables.batch_1d, rows.heads_1d, tables.tokens_1d, rows.head_dim_1d, axis=0)
    by_head = op.Reshape(scanned, heads_shape)
    attended = op.CastLike(by_head, query_key)
    return transpose_heads_and_tokens(op, attended)


def _length(op: OpBuilder, rows: Value) -> Value:
    """Return the root of the mean square of each row, [..., 1], by which a query becomes a key."""
    return op.Sqrt(op.Add(op.ReduceMean(op.Mul(rows, rows), [-1]), _EPSILON))


def _directions(op: OpBuilder, rotations: Value, buckets: Sequence[int], rounds: int) -> list[Value]:
    """Return the directions of each factor of the buckets, [heads, head_dim, rounds * factor].

    They are the rotations of each round and their opposites, side by side.
    """
    directions, start = [], 0
    for factor in buckets:
        half = op.Slice(rotations, [start], [start + factor // 2], [3])
        both_halves = op.Concat(half, op.Neg(half), axis=3)
        directions.append(op.Reshape(both_halves, [0, 0, rounds * factor]))
        start += factor // 2
    return directions


def _buckets(
    op: OpBuilder, rows: Value, directions: Sequence[Value], buckets: Sequence[int], rounds: int, *, axes: int
) -> Value:
    """Return the buckets of float32 rows, [..., tokens, head_dim], as int64, [..., tokens, rounds].

    The first of equal products wins. `axes` is the number of axes of the rows.
    """
    bucket, size = None, 1
    for factor, of_factor in zip(buckets, directions, strict=True):
        products = op.Reshape(op.MatMul(rows, of_factor), [0] * (axes - 1) + [rounds, factor])
        sized = op.Mul(op.ArgMax(products, axis=-1, keepdims=0), size)
        bucket = sized if bucket is None else op.Add(bucket, sized)
        size *= factor
    assert bucket is not None
    return bucket


def _bias(op: OpBuilder, query_positions: Value, key_positions: Value, key_bias: Value, *, causal: bool) -> Value:
    """Return the bias of scores, [..., queries, keys], by positions of queries and keys and the bias of keys."""
    is_self = op.Equal(op.Unsqueeze(query_positions, [-1]), op.Unsqueeze(key_positions, [-2]))
    bias = op.Where(is_self, _SELF_SCORE, op.Unsqueeze(key_bias, [-2]))
    return causal_bias(op, query_positions, key_positions, bias) if causal else bias


def _log_sums(op: OpBuilder, scores: Value, weights: Value) -> Value:
    """Return the logarithms of the sums of exp(scores), [..., queries, 1].

    The largest weight is exp(largest score - logarithm).
    """
    return op.Sub(op.ReduceMax(scores, [-1]), op.Log(op.ReduceMax(weights, [-1])))


_BLOCK = 64
"""The numbers of a block, which are compared with each other."""


def counting_sort(op: OpBuilder, numbers: Value, positions: Value, padded: Value, *, most: int) -> tuple[Value, Value]:
    """The rank of each number, [rows, padded], int64, among the sorted numbers of its row, and the order,
    its inverse.

    A number's rank is how many numbers are smaller, how many equal ones earlier blocks have, and how many equal ones
    precede it in its block. What is counted per number is counted per pair of the number's two digits, so that
    the counts of a block are one product of matrices, in memory linear in numbers. Counts are exact in float32 up to 2
    ** 24 numbers, of 0 to `most`. Equal numbers keep their order. Every runtime has the operators at any length.
    """
    blocks = op.Add(op.Div(op.Sub(padded, 1), _BLOCK), 1)
    fill_1d = op.Unsqueeze(op.Sub(op.Mul(blocks, _BLOCK), padded), [0])
    filled = op.Pad(numbers, op.Concat([0, 0, 0], fill_1d, axis=0), most)
    in_blocks = op.Reshape(filled, [0, -1, _BLOCK])  # [rows, blocks, block]
    base = math.isqrt(most) + 1
    high = op.Div(in_blocks, base)
    low = op.Sub(in_blocks, op.Mul(high, base))
    high_digits, low_digits = (
        upcast(op, op.Equal(op.Unsqueeze(digit, [-1]), list(range(base)))) for digit in (high, low)
    )  # [rows, blocks, block, base]
    digit_counts = op.MatMul(op.Transpose(high_digits, perm=[0, 1, 3, 2]), low_digits)
    counts = op.Reshape(digit_counts, [0, 0, -1])  # [rows, blocks, base * base]
    in_earlier_blocks = op.CumSum(counts, 1, exclusive=1)
    smaller = op.CumSum(op.ReduceSum(counts, [1]), 2, exclusive=1)
    first_rank = op.GatherElements(op.Add(in_earlier_blocks, smaller), in_blocks, axis=2)
    is_equal = op.Equal(op.Unsqueeze(in_blocks, [-1]), op.Unsqueeze(in_blocks, [2]))
    block_range = op.Range(0, _BLOCK, 1)
    is_before = op.And(is_equal, op.Less(block_range, op.Unsqueeze(block_range, [1])))
    in_own_block = op.ReduceSum(upcast(op, is_before), [-1], keepdims=0)
    ranks = op.Cast(op.Add(first_rank, in_own_block), to=DataType.INT64)
    rank = op.Slice(op.Reshape(ranks, [0, -1]), [0], op.Unsqueeze(padded, [0]), [1])
    row_positions = op.Expand(positions, op.Shape(numbers))
    return rank, op.ScatterElements(row_positions, rank, row_positions, axis=1)
