"""What the ONNX function bodies of several operators share: masks, scales, blocks, loops and rows of states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdplugins.op_builder import OpBuilder, float_attribute, scan

if TYPE_CHECKING:
    from onnx_ir import Value

MASKED = -1.0e30
"""The score of a key that a query does not see. It is finite, so that no runtime computes inf - inf; exp() of it is 0
beside the score of a visible key."""

_BLOCK_TOKENS = 128
"""The queries of a block: at 1024 keys their scores stay in a CPU's cache. With 64 to 256 the time hardly differs."""


def upcast(op: OpBuilder, value: Value) -> Value:
    from onnx_ir import DataType

    return op.Cast(value, to=DataType.FLOAT)


def is_nonzero(op: OpBuilder, value: Value) -> Value:
    from onnx_ir import DataType

    return op.Cast(value, to=DataType.BOOL)


def column(op: OpBuilder, count: Value | int) -> Value:
    """Return the numbers from 0 to count - 1 as [count, 1]."""
    return op.Unsqueeze(op.Range(0, count, 1), [1])


def transpose_heads_and_tokens(op: OpBuilder, state: Value) -> Value:
    """Transpose [batch, heads, tokens, head_dim] (BHSD) to [batch, tokens, heads, head_dim] (BSHD), or the reverse."""
    return op.Transpose(state, perm=[0, 2, 1, 3])


def bshd_body(body: Callable[..., Value], *, states: int = 3) -> Callable[..., Value]:
    """Return a BSHD body that transposes states and result of a BHSD body, whose matmuls need heads before tokens.

    `body` takes and returns [batch, heads, tokens, head_dim] (BHSD); the returned body takes and returns [batch,
    tokens, heads, head_dim] (BSHD). Only the first `states` inputs are transposed.
    """

    def transposed(op: OpBuilder, *inputs: Value) -> Value:
        of_heads = [transpose_heads_and_tokens(op, state) for state in inputs[:states]]
        return transpose_heads_and_tokens(op, body(op, *of_heads, *inputs[states:]))

    return transposed


def rows_or_zero(op: OpBuilder, are_defined: Value, rows: Value) -> Value:
    """Return the rows where a boolean that broadcasts to the rows is true, and 0 elsewhere.

    A product with 0 would keep a NaN, and the sums of padding may be NaN.
    """
    return op.Where(are_defined, rows, op.CastLike(0.0, rows))


def biased_scores(op: OpBuilder, scaled_query: Value, keys: Value, bias: Value, *, axes: int) -> Value:
    """The scores of attention over the last two axes, [..., queries, keys], float32.

    Args:
        scaled_query: [..., queries, head_dim]. A scaled query keeps products of half precision in range.
        keys: [..., keys, head_dim].
        bias: the float32 value that is added to the products; it broadcasts to [..., queries, keys].
        axes: the number of axes of the queries and keys.
    """
    key_columns = op.Transpose(keys, perm=[*range(axes - 2), axes - 1, axes - 2])
    return op.Add(upcast(op, op.MatMul(scaled_query, key_columns)), bias)


def attention(op: OpBuilder, scaled_query: Value, keys: Value, values: Value, bias: Value, *, axes: int) -> Value:
    """Return the sums of values, [..., queries, head_dim], by a float32 softmax of the scores of `biased_scores`."""
    weights = op.Softmax(biased_scores(op, scaled_query, keys, bias, axes=axes), axis=-1)
    return op.MatMul(op.CastLike(weights, values), values)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sizes of blocks of queries. Values whose names end in ``_1d`` are [1], the others are [].

    Attributes:
        block: the number of queries of a block; a Python number where the size is fixed.
        count: the number of blocks of a sequence.
        padded_1d: the number of queries of all blocks of a sequence.
    """

    batch_1d: Value
    heads_1d: Value
    tokens_1d: Value
    head_dim_1d: Value
    tokens: Value
    block: Value | int
    block_1d: Value
    count: Value
    count_1d: Value
    padded_1d: Value


def query_blocks(op: OpBuilder, query: Value, *, is_fixed: bool) -> Blocks:
    """The sizes of the blocks of queries, [batch, heads, tokens, head_dim].

    `is_fixed` says whether the block of a shorter sequence has the full size; otherwise it has the size of the
    sequence. With blocks of the size of a shorter sequence, TensorRT-RTX plans far more memory.
    """
    batch_1d, heads_1d, tokens_1d, head_dim_1d = (op.Shape(query, start=axis, end=axis + 1) for axis in range(4))
    tokens = op.Squeeze(tokens_1d)
    block = _BLOCK_TOKENS if is_fixed else op.Min(tokens, _BLOCK_TOKENS)
    count = op.Add(op.Div(op.Sub(tokens, 1), block), 1)
    return Blocks(
        batch_1d=batch_1d,
        heads_1d=heads_1d,
        tokens_1d=tokens_1d,
        head_dim_1d=head_dim_1d,
        tokens=tokens,
        block=block,
        block_1d=op.Unsqueeze(block, [0]),
        count=count,
        count_1d=op.Unsqueeze(count, [0]),
        padded_1d=op.Unsqueeze(op.Mul(count, block), [0]),
    )


@dataclass(frozen=True, kw_only=True)
class SequenceBlocks(Blocks):
    """Blocks that start with the first token of a sequence; padding fills the last block.

    Attributes:
        scale: [], the factor of the scores, in the element type of the queries.
        scaled_query: [batch, heads, padded, head_dim].
        first_queries: [blocks], the number of each block's first query.
        key_bias: [batch, tokens], float32, 0 for a key that the mask shows.
        has_keys: [batch, 1, 1, 1], false for a sequence that consists of padding.
    """

    scale: Value
    scaled_query: Value
    first_queries: Value
    key_bias: Value
    has_keys: Value


def blocks_from_start(op: OpBuilder, query: Value, key_mask: Value, *, is_fixed: bool) -> SequenceBlocks:
    """Cut the queries into blocks; key_mask is [batch, tokens], the other arguments are those of `query_blocks`."""
    blocks = query_blocks(op, query, is_fixed=is_fixed)
    scale = op.CastLike(float_attribute(op, "scale"), query)
    missing_1d = op.Sub(blocks.padded_1d, blocks.tokens_1d)
    padded_query = op.Pad(query, op.Concat([0, 0, 0, 0, 0, 0], missing_1d, [0], axis=0))
    any_real = is_nonzero(op, op.ReduceMax(upcast(op, key_mask), [1], keepdims=1))
    return SequenceBlocks(
        **vars(blocks),
        scale=scale,
        scaled_query=op.Mul(padded_query, scale),
        first_queries=op.Mul(op.Range(0, blocks.count, 1), blocks.block),
        key_bias=op.Where(key_mask, 0.0, MASKED),
        has_keys=op.Unsqueeze(any_real, [2, 3]),
    )


@dataclass(frozen=True, kw_only=True)
class SequenceSizes:
    """The sizes of the sequences of a mask. Values whose names end in ``_1d`` are [1], the others are [].

    Attributes:
        batch_1d: the number of sequences.
        tokens: the number of tokens of a sequence.
        last_token: the index of the last token.
    """

    batch_1d: Value
    tokens_1d: Value
    tokens: Value
    last_token: Value


def sequence_sizes(op: OpBuilder, mask: Value) -> SequenceSizes:
    """The sizes of the sequences of a mask, [batch, tokens]."""
    batch_1d, tokens_1d = op.Shape(mask, end=1), op.Shape(mask, start=1)
    tokens = op.Squeeze(tokens_1d)
    return SequenceSizes(batch_1d=batch_1d, tokens_1d=tokens_1d, tokens=tokens, last_token=op.Sub(tokens, 1))


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """States as rows: row (sequence * tokens + token) * heads + head. Nothing is copied.

    Attributes:
        states: [rows, head_dim] each.
        shape: [-1, head_dim].
        heads_1d: [1], the number of heads.
        num_heads: the number of heads as [].
        head_dim_1d: [1].
        sequence_rows: [], the number of rows of a sequence.
    """

    states: list[Value]
    shape: Value
    heads_1d: Value
    num_heads: Value
    head_dim_1d: Value
    sequence_rows: Value


def state_rows(op: OpBuilder, tokens: Value, *states: Value) -> StateRows:
    """Number the rows of states, [batch, tokens, heads, head_dim]."""
    heads_1d, head_dim_1d = (op.Shape(states[0], start=axis, end=axis + 1) for axis in (2, 3))
    num_heads = op.Squeeze(heads_1d)
    shape = op.Concat([-1], head_dim_1d, axis=0)
    return StateRows(
        states=[op.Reshape(state, shape) for state in states],
        shape=shape,
        heads_1d=heads_1d,
        num_heads=num_heads,
        head_dim_1d=head_dim_1d,
        sequence_rows=op.Mul(tokens, num_heads),
    )


def join_steps(op: OpBuilder, sizes: SequenceSizes, rows: StateRows, sums: Value, like: Value) -> Value:
    """Turn float32 sums of a loop's steps, [steps, ..., heads, head_dim], into [batch, tokens, heads, head_dim]."""
    shape = op.Concat(sizes.batch_1d, [-1], rows.heads_1d, rows.head_dim_1d, axis=0)
    return op.Slice(op.Reshape(op.CastLike(sums, like), shape), [0], sizes.tokens_1d, [1])


def steps_of_sequences(op: OpBuilder, batch_1d: Value, count: Value) -> tuple[Value, Value]:
    """Return the sequence of each step of a loop, and the step's number in its sequence; `count` steps per sequence."""
    steps = op.Range(0, op.Mul(op.Squeeze(batch_1d), count), 1)
    sequences = op.Div(steps, count)
    return sequences, op.Sub(steps, op.Mul(sequences, count))


def split_by_block(op: OpBuilder, blocks: SequenceBlocks) -> Value:
    """Turn the scaled queries into [blocks, batch, heads, block, head_dim]."""
    shape = op.Concat([0, 0], blocks.count_1d, blocks.block_1d, blocks.head_dim_1d, axis=0)
    return op.Transpose(op.Reshape(blocks.scaled_query, shape), perm=[2, 0, 1, 3, 4])


def padded_heads(op: OpBuilder, blocks: Blocks, sums: Value) -> Value:
    """Turn sums of the heads' blocks, in order, into [batch, heads, padded, head_dim]."""
    return op.Reshape(sums, op.Concat(blocks.batch_1d, blocks.heads_1d, blocks.padded_1d, blocks.head_dim_1d, axis=0))


def scan_blocks(op: OpBuilder, attend: Callable[..., Value], firsts: Value) -> Value:
    """Compute the blocks of all heads of all sequences in a loop, one block per step.

    Args:
        attend: takes an `OpBuilder`, the number of the block, and an element of `firsts`, and returns the sums of the
            block, [batch, heads, block, head_dim].
        firsts: [blocks], such as the first query of each block.

    Returns:
        [batch, heads, blocks, block, head_dim], float32.
    """

    def step(op: OpBuilder, number: Value, first: Value) -> tuple[Value, Value]:
        return op.Add(number, 1), upcast(op, attend(op, number, first))

    _, sums = scan(op, step, firsts, states=[0], shapes=[("batch", "heads", "block", "head_dim")])
    return op.Transpose(sums, perm=[1, 2, 0, 3, 4])


def scan_heads(op: OpBuilder, blocks: SequenceBlocks, attend: Callable[..., Value], key: Value, value: Value) -> Value:
    """Compute one head of one sequence after another in a loop.

    Args:
        blocks: the blocks of the queries.
        attend: takes an `OpBuilder`, the numbers of the sequence and the head, [], the blocks of scaled queries,
            [blocks, block, head_dim], and the keys and values, [tokens, head_dim], and returns the sums of the blocks.
        key: [batch, heads, tokens, head_dim], float32; so is `value`.

    Returns:
        [batch, heads, blocks, block, head_dim], float32.
    """

    def step(
        op: OpBuilder, sequence: Value, head: Value, head_queries: Value, head_key: Value, head_value: Value
    ) -> Value:
        sums = attend(op, sequence, head, head_queries, head_key, head_value)
        return op.Reshape(sums, op.Concat(blocks.padded_1d, blocks.head_dim_1d, axis=0))

    sequences, heads = steps_of_sequences(op, blocks.batch_1d, op.Squeeze(blocks.heads_1d))
    blocks_shape = op.Concat([-1], blocks.count_1d, blocks.block_1d, blocks.head_dim_1d, axis=0)
    keys_shape = op.Concat([-1], blocks.tokens_1d, blocks.head_dim_1d, axis=0)
    queries = op.Reshape(blocks.scaled_query, blocks_shape)
    keys, values = (op.Reshape(state, keys_shape) for state in (key, value))
    return scan(op, step, sequences, heads, queries, keys, values, shapes=[("padded", "head_dim")])


def join_blocks(op: OpBuilder, blocks: SequenceBlocks, sums: Value, like: Value) -> Value:
    """Turn float32 sums of `scan_blocks` or `scan_heads` into [batch, heads, tokens, head_dim], 0 without keys."""
    rows = op.Slice(padded_heads(op, blocks, sums), [0], blocks.tokens_1d, [2])
    return op.CastLike(rows_or_zero(op, blocks.has_keys, rows), like)


@dataclass(frozen=True, kw_only=True)
class RowShift:
    """The sizes by which `shift_rows` shifts the rows of [..., block, width].

    Attributes:
        begin_1d: [1], block - 1.
        end_1d: [1], the end of what is kept of the flattened rows.
        shape: [axes], of the shifted rows, [..., block, width - 1].
        axes: the number of axes.
    """

    begin_1d: Value
    end_1d: Value
    shape: Value
    axes: int


def row_shift(op: OpBuilder, block_1d: Value, width_1d: Value, *, axes: int) -> RowShift:
    """Compute the sizes for values of that number of axes, [..., block, width]."""
    begin_1d, shorter_1d = op.Sub(block_1d, [1]), op.Sub(width_1d, [1])
    end_1d = op.Add(op.Mul(block_1d, shorter_1d), begin_1d)
    shape = op.Concat(*[[0]] * (axes - 2), block_1d, shorter_1d, axis=0)
    return RowShift(begin_1d=begin_1d, end_1d=end_1d, shape=shape, axes=axes)


def shift_rows(op: OpBuilder, shift: RowShift, rows: Value, kept_1d: Value) -> Value:
    """Turn [..., block, width] into [..., block, kept], where row r starts in column block - 1 - r of `rows`.

    In the flattened rows, each row starts one value earlier than the row before it.
    """
    flat = op.Reshape(rows, [0] * (shift.axes - 2) + [-1])
    shifted = op.Reshape(op.Slice(flat, shift.begin_1d, shift.end_1d, [-1]), shift.shape)
    return op.Slice(shifted, [0], kept_1d, [-1])
