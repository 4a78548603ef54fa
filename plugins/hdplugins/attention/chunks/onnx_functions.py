"""Chunk attention as function bodies of standard ONNX operators, with memory linear in tokens.

Each chunk of queries meets the chunks that it sees, joined into one span of keys: scores are [..., chunk, span], never
[tokens, tokens].

The chunks are computed in two variants. In the batched variant, they are one batch of products, which engines fuse. In
the blockwise variant, a loop takes a few chunks of one sequence per step, whose scores fit in a CPU's cache at any
batch size. CPU milliseconds and megabytes of growth on one core of an Intel Xeon, 12 heads of 64, chunks of 64 that see
one before; beside it Hugging Face's module in PyTorch, without its projections, called in turn:

======  ==========  ============
tokens  blockwise   Hugging Face
======  ==========  ============
4096    30 (26)     76 (123)
8192    60 (83)     256 (285)
16384   115 (164)   596 (420)
======  ==========  ============

Everything but query, key and value comes from `token_mask`, not from the shapes of these: ONNX Runtime sees then that
all layers of a model need equal tables, and computes them once in the batched variant.
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
    SequenceSizes,
    attention,
    bshd_body,
    join_steps,
    rows_or_zero,
    sequence_sizes,
    state_rows,
    steps_of_sequences,
    upcast,
)
from hdplugins.op_builder import OpBuilder, float_attribute, scan

_STEP_TOKENS = 64
"""The queries of a step of the blockwise variant, of each head."""


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with these attributes; all attributes but ``scale`` decide the body."""
    suffix = "_chunk{chunk}_before{before}_after{after}_of{multiple}".format(**attributes)
    return FunctionBodies(
        suffix=suffix + "_causal" * attributes["causal"],
        batched=bshd_body(partial(_batched, attributes=attributes)),
        blockwise=partial(_blockwise, attributes=attributes),
    )


def _batched(
    op: OpBuilder, query: Value, key: Value, value: Value, token_mask: Value, *, attributes: Mapping[str, Any]
) -> Value:
    chunk, tables = attributes["chunk"], chunk_tables(op, token_mask, attributes)
    scale = op.CastLike(float_attribute(op, "scale"), query)
    seen, query_positions, key_positions = _positions(op, tables, chunk)
    bias = op.Unsqueeze(op.Gather(tables.padded_bias, key_positions, axis=1), [1, 3])  # [batch, 1, chunks, 1, span]
    if attributes["causal"]:
        bias = causal_bias(op, query_positions, key_positions, bias)
    padding = op.Concat([0] * 6, tables.missing_1d, [0], axis=0)
    head_dim_1d, value_dim_1d = op.Shape(query, start=3, end=4), op.Shape(value, start=3, end=4)

    def chunks_of(state: Value, size_1d: Value) -> Value:  # [batch, heads, chunks, chunk, head_dim]
        return op.Reshape(op.Pad(state, padding), op.Concat([0, 0, -1, chunk], size_1d, axis=0))

    def spans_of(state: Value, size_1d: Value) -> Value:  # [batch, heads, chunks, span, head_dim]
        chunks = op.Gather(chunks_of(state, size_1d), seen, axis=2)
        return op.Reshape(chunks, op.Concat([0, 0, 0, -1], size_1d, axis=0))

    scaled_query = op.Mul(chunks_of(query, head_dim_1d), scale)
    spans = spans_of(key, head_dim_1d), spans_of(value, value_dim_1d)
    sums = attention(op, scaled_query, *spans, bias, axes=5)
    rows = op.Slice(op.Reshape(sums, op.Concat([0, 0, -1], head_dim_1d, axis=0)), [0], tables.tokens_1d, [2])
    return rows_or_zero(op, op.Unsqueeze(tables.real, [1, 3]), rows)


def _blockwise(
    op: OpBuilder, query: Value, key: Value, value: Value, token_mask: Value, *, attributes: Mapping[str, Any]
) -> Value:
    chunk, tables = attributes["chunk"], chunk_tables(op, token_mask, attributes)
    scale = op.CastLike(float_attribute(op, "scale"), query)
    _, query_positions, key_positions = _positions(op, tables, chunk)

    # A step takes a group of chunks of a sequence; the last chunk fills the last group.
    group = op.Min(max(_STEP_TOKENS // chunk, 1), tables.chunks)
    last_chunk = op.Sub(tables.chunks, 1)
    groups = op.Add(op.Div(last_chunk, group), 1)
    numbers = op.Min(op.Range(0, op.Mul(groups, group), 1), last_chunk)
    group_1d = op.Unsqueeze(group, [0])
    query_groups, key_groups = (
        op.Reshape(
            op.Gather(positions, numbers, axis=0), op.Concat([-1], group_1d, op.Shape(positions, start=1), axis=0)
        )
        for positions in (query_positions, key_positions)
    )

    rows = state_rows(op, tables.tokens, query, key, value)
    all_queries, all_keys, all_values = rows.states
    head_numbers = op.Unsqueeze(op.Range(0, rows.num_heads, 1), [1, 2])

    def attend(op: OpBuilder, sequence: Value, group: Value) -> Value:
        queries, keys = op.Gather(query_groups, group, axis=0), op.Gather(key_groups, group, axis=0)
        sequence_bias = op.Gather(tables.padded_bias, sequence, axis=0)
        bias = op.Unsqueeze(op.Gather(sequence_bias, keys, axis=0), [-2])  # [group, 1, span]
        if attributes["causal"]:
            bias = causal_bias(op, queries, keys, bias)
        head_starts = op.Add(head_numbers, op.Mul(sequence, rows.sequence_rows))
        query_rows, key_rows = (
            op.Add(head_starts, op.Mul(op.Min(positions, tables.last_token), rows.num_heads))
            for positions in (queries, keys)
        )
        block_query = op.Gather(all_queries, query_rows, axis=0)  # [heads, group, chunk, head_dim]
        block_key, block_value = (op.Gather(state, key_rows, axis=0) for state in (all_keys, all_values))
        sums = attention(op, op.Mul(block_query, scale), block_key, block_value, bias, axes=4)
        transposed_sums = op.Transpose(sums, perm=[1, 2, 0, 3])
        is_real = op.Unsqueeze(op.Equal(op.Gather(sequence_bias, queries, axis=0), 0.0), [-2, -1])
        return upcast(op, rows_or_zero(op, is_real, transposed_sums))

    sequences, numbers = steps_of_sequences(op, tables.batch_1d, groups)
    scanned = scan(op, attend, sequences, numbers, shapes=[("group", "chunk", "heads", "head_dim")])
    return join_steps(op, tables, rows, scanned, query)


def causal_bias(op: OpBuilder, query_positions: Value, key_positions: Value, bias: Value) -> Value:
    """A float32 bias, [..., queries, keys], in which keys after a query are masked as well."""
    is_after = op.Greater(op.Unsqueeze(key_positions, [-2]), op.Unsqueeze(query_positions, [-1]))
    return op.Where(is_after, MASKED, bias)


@dataclass(frozen=True, kw_only=True)
class ChunkTables(SequenceSizes):
    """Which tokens are real, and which chunks a chunk sees. Values whose names end in ``_1d`` are [1].

    Attributes:
        padded: [], the number of tokens of all chunks of a round.
        missing_1d: the number of these tokens after the sequence.
        chunks: [], the number of chunks of a round.
        all_chunks: [], the number of chunks of all rounds.
        positions: [padded], from 0.
        real: [batch, tokens], whether a token is no padding.
        padded_bias: [batch, padded], float32, 0 for real keys and `MASKED` for padding.
        seen: [batch or 1, chunks of all rounds, before + 1 + after], the chunks that a chunk sees.
    """

    padded: Value
    padded_1d: Value
    missing_1d: Value
    chunks: Value
    all_chunks: Value
    positions: Value
    real: Value
    padded_bias: Value
    seen: Value


def chunk_tables(op: OpBuilder, token_mask: Value, attributes: Mapping[str, Any]) -> ChunkTables:
    """The tables, for which the token mask, [batch, tokens], and the attributes of a node suffice.

    LSH attention alone has ``rounds``, whose chunks form one circle, and ``ends_by_row``, with which the circle has the
    chunks of each sequence's own real tokens; otherwise the circle of all sequences has the chunks of the batch.
    """
    chunk, before, after, multiple = (attributes[name] for name in ("chunk", "before", "after", "multiple"))
    rounds, by_row = attributes.get("rounds", 1), attributes.get("ends_by_row", 0)
    sizes = sequence_sizes(op, token_mask)
    padded = op.Mul(op.Add(op.Div(sizes.last_token, multiple), 1), multiple)
    padded_1d = op.Unsqueeze(padded, [0])
    missing_1d = op.Sub(padded_1d, sizes.tokens_1d)
    chunks = op.Div(padded, chunk)
    real = op.Cast(token_mask, to=DataType.BOOL)
    own_chunks = _own_chunks(op, real, chunk=chunk, multiple=multiple) if by_row else op.Unsqueeze(chunks, [0])
    return ChunkTables(
        **vars(sizes),
        padded=padded,
        padded_1d=padded_1d,
        missing_1d=missing_1d,
        chunks=chunks,
        all_chunks=op.Mul(chunks, rounds),
        positions=op.Range(0, padded, 1),
        real=real,
        padded_bias=op.Pad(op.Where(real, 0.0, MASKED), op.Concat([0, 0, 0], missing_1d, axis=0), MASKED),
        seen=_seen_chunks(op, own_chunks, chunks, rounds=rounds, steps=list(range(-before, after + 1))),
    )


def _own_chunks(op: OpBuilder, real: Value, *, chunk: int, multiple: int) -> Value:
    """Return how many chunks of a round are in the circle of each sequence, [batch]."""
    real_tokens = op.ReduceSum(op.Cast(real, to=DataType.INT64), [1], keepdims=0)
    rounded_ends = op.Add(op.Max(real_tokens, 1), multiple - 1)
    return op.Mul(op.Div(rounded_ends, multiple), multiple // chunk)


def _seen_chunks(op: OpBuilder, own_chunks: Value, chunks: Value, *, rounds: int, steps: list[int]) -> Value:
    """Return the chunks that a chunk sees.

    A step of as many chunks as the circle has, or more, leads nowhere. Chunks after the end of a sequence's chunks
    see some chunks of the sequence: as their queries are padding, it does not matter which.
    """
    own_rows = op.Unsqueeze(own_chunks, [1, 2, 3])
    circle = op.Mul(own_rows, rounds)
    steps_in_circle = op.Where(op.Less([abs(step) for step in steps], circle), steps, 0)
    round_starts = op.Mul(op.Unsqueeze(list(range(rounds)), [1, 2]), own_rows)
    circle_numbers = op.Add(round_starts, op.Unsqueeze(op.Range(0, chunks, 1), [1]))  # [batch or 1, rounds, chunks, 1]
    above_zero = op.Add(op.Add(circle_numbers, steps_in_circle), circle)
    seen_numbers = op.Sub(above_zero, op.Mul(op.Div(above_zero, circle), circle))
    seen_rounds = op.Div(seen_numbers, own_rows)
    seen_of_round = op.Sub(seen_numbers, op.Mul(seen_rounds, own_rows))
    return op.Reshape(op.Add(op.Mul(seen_rounds, chunks), seen_of_round), [0, -1, len(steps)])


def _positions(op: OpBuilder, tables: ChunkTables, chunk: int) -> tuple[Value, Value, Value]:
    """Return the chunks that a chunk sees, and the positions of queries, [chunks, chunk], and keys, [chunks, span]."""
    seen = op.Squeeze(tables.seen, [0])
    query_positions = op.Reshape(tables.positions, [-1, chunk])
    return seen, query_positions, op.Reshape(op.Gather(query_positions, seen, axis=0), [0, -1])
