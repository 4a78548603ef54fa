"""Block-sparse attention as function bodies of standard ONNX operators, with memory linear in tokens.

A block of queries meets the first blocks, the last one, its neighbours, and those that the table lists for it, joined
into one span of keys: scores are [..., block, span], never [tokens, tokens]. A bias of [blocks, span] says how often a
key counts (`tables.py`). The few queries of global blocks meet all keys, and so do sequences that are attended to
densely.

The blocks are computed in two variants. In the batched variant, they are one batch of products, which engines fuse: the
sequence is split into blocks by reshaping, neighbours are the blocks shifted, and only listed blocks are gathered.
Short sequences are computed densely in a branch that runs where there are any; it sees no more keys than the longest
short sequence has, for an engine plans memory for the largest shapes. In the blockwise variant, a loop takes one block
of one sequence per step, which fits in a CPU's caches at any batch size; a step gathers the keys that it sees. The rows
of global blocks come from a separate loop, one head per step, so that no step holds all keys of all heads. Three
quarters of the time of the blockwise variant are products.

Everything but query, key and value comes from `token_mask`, not from the shapes of these: ONNX Runtime sees then that
all layers of a model need equal tables, and computes them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from onnx_ir import Value

from hdplugins.attention.blocks.tables import BlockTables, Parts, block_tables, neighbours
from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import (
    MASKED,
    StateRows,
    attention,
    bshd_body,
    join_steps,
    rows_or_zero,
    state_rows,
    steps_of_sequences,
    upcast,
)
from hdplugins.op_builder import OpBuilder, cond, float_attribute, scan


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any]) -> FunctionBodies:
    """The bodies for nodes with these inputs and attributes; how many blocks there are, a body reads from each node.

    A ValueError says that the queries of a long sequence would see nothing at all.
    """
    parts = Parts.of(attributes, listed="listed_blocks" in inputs)
    return FunctionBodies(
        suffix=parts.suffix,
        batched=bshd_body(partial(_batched, parts=parts)),
        blockwise=partial(_blockwise, parts=parts),
    )


def _sparse_attention(
    op: OpBuilder, parts: Parts, scaled_query: Value, keys: Value, values: Value, bias: Value, *, axes: int
) -> Value:
    """Compute the attention of queries over the spans of their blocks, 0 for a query that sees no key."""
    sums = attention(op, scaled_query, keys, values, bias, axes=axes)
    if parts.window >= 0:
        return sums
    # Without a window, a query may see nothing, not even itself.
    return rows_or_zero(op, op.Greater(op.ReduceMax(bias, [-1]), MASKED / 10), sums)


def _batched(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    token_mask: Value,
    listed_blocks: Value | None = None,
    *,
    parts: Parts,
) -> Value:
    tables = block_tables(op, parts, token_mask, listed_blocks)
    scale = op.CastLike(float_attribute(op, "scale"), query)

    def sparse(op: OpBuilder) -> Value:  # [batch, heads, tokens, head_dim]
        key_span, value_span = (_spans(op, parts, tables, state) for state in (key, value))
        heads_1d, head_dim_1d = op.Shape(query, start=1, end=2), op.Shape(query, start=3)
        _, query_blocks = _cut(op, tables, query, head_dim_1d, window=0)
        block_sums = _sparse_attention(
            op, parts, op.Mul(query_blocks, scale), key_span, value_span, tables.bias, axes=5
        )
        rows_shape = op.Concat([0, 0, -1], head_dim_1d, axis=0)
        global_queries = []
        if parts.first:
            first_blocks = op.Slice(query_blocks, [0], op.Unsqueeze(tables.first_global, [0]), [2])
            global_queries.append(op.Reshape(first_blocks, rows_shape))
        if tables.last is not None:
            global_queries.append(op.Squeeze(_last_block(op, tables, query_blocks, heads_1d, head_dim_1d), [2]))
        if not global_queries:
            return op.Slice(op.Reshape(block_sums, rows_shape), [0], tables.tokens_1d, [2])
        all_bias = op.Unsqueeze(tables.token_bias, [1, 2])
        scaled_queries = op.Mul(op.Concat(*global_queries, axis=2), scale)
        last_sums = global_sums = attention(op, scaled_queries, key, value, all_bias, axes=4)
        first_rows_1d = op.Shape(global_queries[0], start=2, end=3) if parts.first else None
        if parts.first:
            last_sums = op.Slice(global_sums, first_rows_1d, op.Shape(global_sums, start=2, end=3), [2])
        if tables.last is not None:
            is_last = op.Unsqueeze(tables.last.is_last, [1, 3, 4])
            block_sums = op.Where(is_last, op.Unsqueeze(last_sums, [2]), block_sums)
        rows = op.Reshape(block_sums, rows_shape)
        if parts.first:
            others = op.Slice(rows, first_rows_1d, op.Mul(tables.blocks_1d, tables.block_1d), [2])
            rows = op.Concat(op.Slice(global_sums, [0], first_rows_1d, [2]), others, axis=2)
        return op.Slice(rows, [0], tables.tokens_1d, [2])

    short = tables.short
    if short is None:
        joined = sparse(op)
    else:
        nothing = op.CastLike(0.0, query)

        def all_are_short(op: OpBuilder) -> Value:
            return op.Expand(nothing, op.Shape(query))

        # All queries meet the keys of the longest short sequence: with as few queries, TensorRT-RTX 1.7.1 fails to
        # build.
        def some_are_short(op: OpBuilder) -> Value:
            end_1d = op.Unsqueeze(short.longest, [0])
            keys, values = (op.Slice(state, [0], end_1d, [2]) for state in (key, value))
            bias = op.Unsqueeze(op.Slice(tables.token_bias, [0], end_1d, [1]), [1, 2])
            short_rows = attention(op, op.Mul(query, scale), keys, values, bias, axes=4)
            return op.Where(op.Unsqueeze(short.is_short, [1, 2, 3]), short_rows, sparse_rows)

        def none_is_short(op: OpBuilder) -> Value:
            return op.Identity(sparse_rows)

        sparse_rows = cond(op, short.all_short, all_are_short, sparse)
        joined = cond(op, short.any_short, some_are_short, none_is_short)
    return rows_or_zero(op, op.Unsqueeze(tables.real, [1, 3]), joined)


def _cut(op: OpBuilder, tables: BlockTables, state: Value, head_dim_1d: Value, *, window: int) -> tuple[Value, Value]:
    """A state in blocks, [batch, heads, blocks, block, head_dim]: with `window` empty ones on both sides, and alone."""
    before_1d = op.Mul(tables.block_1d, [window])
    after_1d = op.Add(before_1d, tables.missing_1d)
    padded = op.Pad(state, op.Concat([0, 0], before_1d, [0, 0, 0], after_1d, [0], axis=0))
    wide_blocks = op.Reshape(padded, op.Concat([0, 0, -1], tables.block_1d, head_dim_1d, axis=0))
    return wide_blocks, op.Slice(wide_blocks, [window], op.Add(tables.blocks_1d, [window]), [2])


def _last_block(op: OpBuilder, tables: BlockTables, blocks: Value, heads_1d: Value, head_dim_1d: Value) -> Value:
    """Return the last block of each sequence, [batch, heads, 1, block, head_dim]."""
    assert tables.last is not None
    shape = op.Concat([1], heads_1d, [1], tables.block_1d, head_dim_1d, axis=0)
    return op.GatherElements(blocks, op.Expand(op.Unsqueeze(tables.last.numbers, [1, 2, 3, 4]), shape), axis=2)


def _spans(op: OpBuilder, parts: Parts, tables: BlockTables, state: Value) -> Value:
    """Return the keys or values of the spans of blocks, [batch, heads, blocks, span, head_dim]."""
    reach = max(parts.window, 0)
    heads_1d, head_dim_1d = op.Shape(state, start=1, end=2), op.Shape(state, start=3)
    wide_blocks, blocks = _cut(op, tables, state, head_dim_1d, window=reach)
    of_each_block = op.Concat([1, 1], tables.blocks_1d, [1, 1], axis=0)
    spans = []
    if tables.front_end_1d is not None:
        front = op.Slice(blocks, [0], tables.front_end_1d, [2])
        spans.append(op.Expand(op.Reshape(front, op.Concat([0, 0, 1, -1], head_dim_1d, axis=0)), of_each_block))
    if tables.last is not None:
        spans.append(op.Expand(_last_block(op, tables, blocks, heads_1d, head_dim_1d), of_each_block))
    if parts.window >= 0:
        spans.append(neighbours(op, wide_blocks, tables.blocks_1d, reach, axis=2))
    if tables.listed is not None:
        # One index for the blocks of all heads, since each head may have rows in the table.
        head_starts = op.Unsqueeze(op.Mul(op.Range(0, op.Squeeze(heads_1d), 1), tables.blocks), [1, 2])
        rows = op.Reshape(blocks, op.Concat([0, -1], tables.block_1d, head_dim_1d, axis=0))
        listed = op.Gather(rows, op.Add(head_starts, tables.listed), axis=1)
        spans.append(op.Reshape(listed, op.Concat([0, 0, 0, -1], head_dim_1d, axis=0)))
    return op.Concat(*spans, axis=3)


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    token_mask: Value,
    listed_blocks: Value | None = None,
    *,
    parts: Parts,
) -> Value:
    tables = block_tables(op, parts, token_mask, listed_blocks)
    scale = op.CastLike(float_attribute(op, "scale"), query)
    block_range = op.Range(0, tables.block, 1)
    rows = state_rows(op, tables.tokens, query, key, value)
    all_queries, all_keys, all_values = rows.states
    head_numbers = op.Range(0, rows.num_heads, 1)

    # A step is a block of a sequence.
    sequences, step_blocks = steps_of_sequences(op, tables.batch_1d, tables.blocks)
    sequence_starts = op.Mul(op.Unsqueeze(sequences, [1]), rows.sequence_rows)
    row_starts = op.Unsqueeze(op.Add(sequence_starts, head_numbers), [-1])
    query_starts = op.Unsqueeze(op.Mul(step_blocks, tables.block), [1])
    query_tokens = op.Min(op.Add(query_starts, block_range), tables.last_token)
    query_offsets = op.Mul(query_tokens, rows.num_heads)  # [steps, block]
    key_offsets = op.Mul(_key_tokens(op, parts, tables, block_range), rows.num_heads)
    transposed_offsets = op.Transpose(key_offsets, perm=[0, 2, 1, 3])
    transposed_bias = op.Transpose(tables.bias, perm=[0, 2, 1, 3, 4])
    key_offsets, bias = (  # [steps, 1 or heads, span] and [steps, 1 or heads, 1, span]
        op.Reshape(table, op.Concat([-1], op.Shape(table, start=2), axis=0))
        for table in (transposed_offsets, transposed_bias)
    )
    real_keys = op.Greater(tables.key_bias, MASKED / 10)
    real = op.Reshape(real_keys, op.Concat([-1], tables.block_1d, [1, 1], axis=0))

    short, short_steps, short_offsets, short_bias = tables.short, None, None, None
    if short is not None:
        short_steps = op.Gather(short.is_short, sequences, axis=0)
        end = op.Min(tables.tokens, short.longest)
        short_offsets = op.Unsqueeze(op.Mul(op.Range(0, end, 1), rows.num_heads), [0])
        short_token_bias = op.Slice(tables.token_bias, [0], op.Unsqueeze(end, [0]), [1])
        short_bias = op.Unsqueeze(short_token_bias, [1, 2])
    global_rows = is_global_step = global_index = None
    if parts.global_rows:
        global_rows, is_global_step, global_index = _global_rows(
            op, parts, tables, rows, head_numbers, scale, block_range
        )

    def attend(
        op: OpBuilder,
        row_starts: Value,
        query_offsets: Value,
        key_offsets: Value,
        bias: Value,
        is_real: Value,
        is_short: Value | None,
        sequence: Value | None,
        is_global: Value | None,
        index: Value | None,
    ) -> Value:
        def dense_keys(op: OpBuilder) -> tuple[Value, Value]:
            return op.Identity(short_offsets), op.Gather(short_bias, sequence, axis=0)

        def sparse_keys(op: OpBuilder) -> tuple[Value, Value]:
            return op.Identity(key_offsets), op.Identity(bias)

        def attend_to_list(op: OpBuilder) -> Value:  # [heads, block, head_dim]
            offsets, step_bias = (
                (key_offsets, bias) if is_short is None else cond(op, is_short, dense_keys, sparse_keys)
            )
            block_query = op.Gather(all_queries, op.Add(row_starts, query_offsets), axis=0)
            key_rows = op.Add(row_starts, offsets)
            keys, values = (op.Gather(state, key_rows, axis=0) for state in (all_keys, all_values))
            return _sparse_attention(op, parts, op.Mul(block_query, scale), keys, values, step_bias, axes=3)

        def global_sums(op: OpBuilder) -> Value:
            return op.Gather(global_rows, index, axis=0)

        sums = attend_to_list(op) if is_global is None else cond(op, is_global, global_sums, attend_to_list)
        return upcast(op, rows_or_zero(op, is_real, op.Transpose(sums, perm=[1, 0, 2])))

    of_short = (None, None) if short is None else (short_steps, sequences)
    scan_inputs = row_starts, query_offsets, key_offsets, bias, real, *of_short, is_global_step, global_index
    scanned = scan(op, attend, *scan_inputs, shapes=[("block", "heads", "head_dim")])
    return join_steps(op, tables, rows, scanned, query)


def _key_tokens(op: OpBuilder, parts: Parts, tables: BlockTables, block_range: Value) -> Value:
    """Return the tokens that the bias of the tables is about, [batch, 1 or heads, blocks, span]."""
    of_blocks = op.Concat(tables.batch_1d, tables.blocks_1d, [1], axis=0)
    spans = []
    if tables.front_end_1d is not None:
        spans.append(op.Expand(op.Slice(tables.numbers, [0], tables.front_end_1d, [0]), of_blocks))
    if tables.last is not None:
        spans.append(op.Expand(op.Unsqueeze(tables.last.numbers, [1, 2]), of_blocks))
    if parts.window >= 0:
        offsets = list(range(-parts.window, parts.window + 1))
        near = op.Max(op.Add(op.Unsqueeze(tables.numbers, [1]), offsets), 0)
        spans.append(op.Expand(op.Min(near, op.Sub(tables.blocks, 1)), of_blocks))
    index = (
        op.Unsqueeze(op.Concat(*spans, axis=2), [1]) if spans else None
    )  # [batch, 1 or heads, blocks, span of blocks]
    if tables.listed is not None:
        listed = op.Expand(tables.listed, op.Concat(tables.batch_1d, [1, 1, 1], axis=0))
        if index is None:
            index = listed
        else:
            to_heads = op.Concat([1], op.Shape(listed, start=1, end=2), [1, 1], axis=0)
            index = op.Concat(op.Expand(index, to_heads), listed, axis=3)
    starts = op.Unsqueeze(op.Mul(index, tables.block), [-1])
    return op.Min(op.Reshape(op.Add(starts, block_range), [0, 0, 0, -1]), tables.last_token)


def _global_rows(
    op: OpBuilder,
    parts: Parts,
    tables: BlockTables,
    rows: StateRows,
    head_numbers: Value,
    scale: Value,
    block_range: Value,
) -> tuple[Value, Value, Value]:
    """Let the queries of global blocks see all keys, one head of one sequence per step.

    Returns [batch * slots, heads, block, head_dim]; whether the block of each step of the blockwise body is global,
    [steps]; and the index of the block in the first result, [steps].
    """
    all_queries, all_keys, all_values = rows.states
    last_block = op.Sub(tables.blocks, 1)
    slots, last_slot = [], None
    if parts.first:
        first = op.Min(op.Range(0, tables.first_global, 1), last_block)
        slots.append(op.Expand(first, op.Concat(tables.batch_1d, [1], axis=0)))
    if tables.last is not None:
        slots.append(op.Unsqueeze(tables.last.numbers, [1]))
        last_slot = tables.first_global if parts.first else 0
    blocks = op.Concat(*slots, axis=1)  # [batch, slots]
    starts = op.Unsqueeze(op.Mul(blocks, tables.block), [-1])
    tokens = op.Min(op.Reshape(op.Add(starts, block_range), [0, 1, -1]), tables.last_token)  # [batch, 1, slots * block]
    batch = op.Squeeze(tables.batch_1d)
    sequences = op.Unsqueeze(op.Range(0, batch, 1), [1])
    head_starts = op.Add(op.Mul(sequences, rows.sequence_rows), head_numbers)  # [batch, heads]
    query_rows = op.Add(op.Unsqueeze(head_starts, [-1]), op.Mul(tokens, rows.num_heads))
    scaled_queries = op.Mul(op.Gather(all_queries, query_rows, axis=0), scale)
    steps_1d = op.Unsqueeze(op.Mul(batch, rows.num_heads), [0])
    queries = op.Reshape(scaled_queries, op.Concat(steps_1d, [-1], rows.head_dim_1d, axis=0))
    token_offsets = op.Mul(op.Range(0, tables.tokens, 1), rows.num_heads)
    to_heads = op.Concat([1], rows.heads_1d, [1, 1], axis=0)
    all_bias = op.Expand(op.Unsqueeze(tables.token_bias, [1, 2]), to_heads)
    biases = op.Reshape(all_bias, op.Concat([-1, 1], tables.tokens_1d, axis=0))

    def attend_to_all(op: OpBuilder, head_queries: Value, head_start: Value, head_bias: Value) -> Value:
        own_rows = op.Add(head_start, token_offsets)
        keys, values = (op.Gather(state, own_rows, axis=0) for state in (all_keys, all_values))
        return upcast(op, attention(op, head_queries, keys, values, head_bias, axes=2))

    scanned = scan(op, attend_to_all, queries, op.Reshape(head_starts, [-1]), biases, shapes=[("rows", "head_dim")])
    slots_1d = op.Shape(blocks, start=1)
    by_slot = op.Concat(tables.batch_1d, rows.heads_1d, slots_1d, tables.block_1d, rows.head_dim_1d, axis=0)
    slots_first = op.Transpose(op.Reshape(op.CastLike(scanned, all_queries), by_slot), perm=[0, 2, 1, 3, 4])
    shape = op.Concat([-1], rows.heads_1d, tables.block_1d, rows.head_dim_1d, axis=0)
    slot = last_slot
    if parts.first:
        slot = tables.numbers if last_slot is None else op.Where(tables.is_first, tables.numbers, last_slot)
    indices = op.Add(op.Mul(sequences, op.Squeeze(slots_1d)), slot)
    sequence_blocks = op.Concat(tables.batch_1d, tables.blocks_1d, axis=0)
    return (
        op.Reshape(slots_first, shape),
        op.Reshape(op.Expand(tables.is_global, sequence_blocks), [-1]),
        op.Reshape(op.Expand(indices, sequence_blocks), [-1]),
    )
