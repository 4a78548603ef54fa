"""The keys that each block of queries sees, and how often the keys count: computed of the token mask alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ir import DataType, Value

from hdplugins.attention.function_parts import MASKED, SequenceSizes, sequence_sizes, upcast
from hdplugins.op_builder import OpBuilder, integer_attribute


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a body.

    Attributes:
        first: the first blocks are global.
        last: the last block is global.
        window: the blocks on each side that a query sees; -1 for none, not even the query's block.
        repeats: block 0 is seen (once more), though it is not global.
        dense: short sequences are attended to densely.
        by_row: each sequence ends after its last real token, and that matters.
        listed: a table lists blocks.
    """

    first: bool
    last: bool
    window: int
    repeats: bool
    dense: bool
    by_row: bool
    listed: bool

    @classmethod
    def of(cls, attributes: Mapping[str, Any], *, listed: bool) -> Parts:
        first, last = attributes["first_global"] > 0, attributes["last_global"] > 0
        dense, window = attributes["dense_tokens"] > 0, attributes["window"]
        repeats = attributes["first_repeats"] > 0 and not first
        if not (first or last or repeats or listed or window >= 0):
            raise ValueError(
                "Without global blocks, window, repeated blocks and a table, its queries see nothing: give it a table, "
                "or a window of 0 blocks or more."
            )
        return cls(
            first=first,
            last=last,
            window=window,
            repeats=repeats,
            dense=dense,
            by_row=attributes["ends_by_row"] > 0 and (last or dense),
            listed=listed,
        )

    @property
    def suffix(self) -> str:
        """The end of the name of a body, by which bodies differ."""
        present = {
            "first": self.first,
            "last": self.last,
            f"window{self.window}": self.window >= 0,
            "repeats": self.repeats,
            "dense": self.dense,
            "byrow": self.by_row,
            "listed": self.listed,
        }
        return "".join(f"_{part}" for part, is_there in present.items() if is_there)

    @property
    def front(self) -> bool:
        """Whether all queries see blocks at the start of the sequence."""
        return self.first or self.repeats

    @property
    def global_rows(self) -> bool:
        """Whether the queries of some blocks see all keys."""
        return self.first or self.last


def longest_dense(attributes: Mapping[str, Any], *, listed: bool) -> int:
    """Return the tokens up to which every query of a sequence sees every key once; 0 for none."""
    # Queries of global blocks see every key. So do other queries that are no further from each other than a window
    # reaches, unless something is seen again.
    blocks = attributes["first_global"] + attributes["last_global"]
    if not listed and attributes["first_repeats"] == 0:
        blocks += attributes["window"] + 1
    return int(max(attributes["dense_tokens"], attributes["block_size"] * blocks))


@dataclass(frozen=True, kw_only=True)
class LastBlocks:
    """The last block of each sequence.

    Attributes:
        numbers: [batch], 0 for a sequence of padding that ends after its own last real token.
        is_last: [batch, blocks], false for all blocks of such a sequence.
    """

    numbers: Value
    is_last: Value


@dataclass(frozen=True, kw_only=True)
class ShortSequences:
    """The sequences that are attended to densely.

    Attributes:
        longest: [], the tokens of the longest such sequence.
        is_short: [batch].
        all_short: [].
        any_short: [].
    """

    longest: Value
    is_short: Value
    all_short: Value
    any_short: Value


@dataclass(frozen=True, kw_only=True)
class BlockTables(SequenceSizes):
    """The blocks of the sequences. Values whose names end in ``_1d`` are [1].

    Attributes:
        block: [], the tokens of a block.
        blocks: [], the number of blocks.
        missing_1d: the tokens of the blocks after the sequence.
        first_global: [], the number of global blocks at the start.
        numbers: [blocks], from 0.
        is_first: [blocks], whether a block is one of the first, global ones.
        is_global: [batch, blocks], or [blocks] where only the first ones are global; None without global blocks.
        real: [batch, tokens], whether a token is no padding.
        token_bias: [batch, tokens], float32, 0 for real keys.
        key_bias: [batch, blocks, block], float32, 0 for real keys; padding, also after the sequence, is masked.
        last: the last blocks; None where they are not global.
        front_end_1d: the number of blocks at the start that all queries see; None without any.
        listed: [1 or heads, blocks, listed], the blocks that the table lists, and 0 where it lists none; None without a
            table.
        bias: [batch, 1 or heads, blocks, 1, span], float32: 0 for a key that counts once, log(m) for m times, and far
            below for a key that is hidden or there in another way.
        short: the sequences that are attended to densely; None without any.
    """

    block: Value
    block_1d: Value
    blocks: Value
    blocks_1d: Value
    missing_1d: Value
    first_global: Value
    numbers: Value
    is_first: Value
    is_global: Value | None
    real: Value
    token_bias: Value
    key_bias: Value
    last: LastBlocks | None
    front_end_1d: Value | None
    listed: Value | None
    bias: Value
    short: ShortSequences | None


def block_tables(op: OpBuilder, parts: Parts, token_mask: Value, listed_blocks: Value | None) -> BlockTables:
    """The tables for a mask, [batch, tokens], and listed blocks, [1 or heads, rows, listed], or None."""
    block, first_global = integer_attribute(op, "block_size"), integer_attribute(op, "first_global")
    block_1d = op.Unsqueeze(block, [0])
    sizes = sequence_sizes(op, token_mask)
    blocks = op.Add(op.Div(sizes.last_token, block), 1)
    blocks_1d = op.Unsqueeze(blocks, [0])
    missing_1d = op.Sub(op.Mul(blocks_1d, block_1d), sizes.tokens_1d)
    numbers = op.Range(0, blocks, 1)
    is_first = op.Less(numbers, first_global)
    real = op.Cast(token_mask, to=DataType.BOOL)
    token_bias = op.Where(real, 0.0, MASKED)
    padded_bias = op.Pad(token_bias, op.Concat([0, 0, 0], missing_1d, axis=0), MASKED)
    key_bias = op.Reshape(padded_bias, op.Concat([0, -1], block_1d, axis=0))
    of_each_block = op.Concat([1], blocks_1d, [1], axis=0)

    last = short = None
    if parts.last or parts.dense:
        ends = _ends_by_row(op, real, sizes.tokens) if parts.by_row else op.Expand(sizes.tokens, sizes.batch_1d)
        last = _last_blocks(op, ends, block, numbers) if parts.last else None
        short = _short_sequences(op, parts, ends, sizes.tokens) if parts.dense else None
    is_global, near_key_bias = (is_first if parts.first else None), key_bias
    if last is not None:
        is_global = last.is_last if is_global is None else op.Or(is_global, last.is_last)
    if is_global is not None:
        near_key_bias = op.Where(op.Unsqueeze(is_global, [-1]), MASKED, key_bias)

    spans, front_end_1d = [], None
    if parts.front:
        repeats = integer_attribute(op, "first_repeats")
        front_end_1d = op.Unsqueeze(op.Max(first_global, op.Min(repeats, 1)), [0])
        is_zero = op.Cast(op.Equal(numbers, 0), to=DataType.INT64)
        times = op.Add(op.Cast(is_first, to=DataType.INT64), op.Mul(is_zero, repeats))
        logs = op.Log(upcast(op, op.Slice(times, [0], front_end_1d, [0])))
        front_bias = op.Add(op.Slice(key_bias, [0], front_end_1d, [1]), op.Unsqueeze(logs, [1]))
        spans.append(op.Expand(op.Reshape(front_bias, [0, 1, -1]), of_each_block))
    if last is not None:
        cell = op.Unsqueeze(last.numbers, [1, 2])
        last_bias = op.GatherElements(key_bias, op.Expand(cell, op.Concat([1, 1], block_1d, axis=0)), axis=1)
        if parts.first:
            last_bias = op.Where(op.Less(cell, first_global), MASKED, last_bias)
        spans.append(op.Expand(last_bias, of_each_block))
    if parts.window >= 0:
        reach = parts.window
        spans.append(
            neighbours(op, op.Pad(near_key_bias, [0, reach, 0, 0, reach, 0], MASKED), blocks_1d, reach, axis=1)
        )
    bias = op.Unsqueeze(op.Concat(*spans, axis=2), [1, 3]) if spans else None

    listed = None
    if listed_blocks is not None:
        listed, exists = _listed(op, listed_blocks, first_global, blocks)
        exists_bias = op.Unsqueeze(op.Where(exists, 0.0, MASKED), [-1])
        listed_bias = op.Reshape(op.Add(op.Gather(key_bias, listed, axis=1), exists_bias), [0, 0, 0, 1, -1])
        if bias is None:
            bias = listed_bias
        else:
            to_heads = op.Concat([1], op.Shape(listed_bias, start=1, end=2), [1, 1, 1], axis=0)
            bias = op.Concat(op.Expand(bias, to_heads), listed_bias, axis=4)
    assert bias is not None
    return BlockTables(
        **vars(sizes),
        block=block,
        block_1d=block_1d,
        blocks=blocks,
        blocks_1d=blocks_1d,
        missing_1d=missing_1d,
        first_global=first_global,
        numbers=numbers,
        is_first=is_first,
        is_global=is_global,
        real=real,
        token_bias=token_bias,
        key_bias=key_bias,
        last=last,
        front_end_1d=front_end_1d,
        listed=listed,
        bias=bias,
        short=short,
    )


def neighbours(op: OpBuilder, rows: Value, count_1d: Value, window: int, *, axis: int) -> Value:
    """The rows of each block's neighbours, `window` blocks before and after it, joined along the axis after `axis`.


    `rows` are those of all blocks, and of `window` more on both sides, along the axis of the blocks; `count_1d`, [1],
    is how many blocks there are.
    """
    shifts = range(2 * window + 1)
    return op.Concat(*(op.Slice(rows, [shift], op.Add(count_1d, [shift]), [axis]) for shift in shifts), axis=axis + 1)


def _ends_by_row(op: OpBuilder, real: Value, tokens: Value) -> Value:
    """Return the position after the last real token of each sequence, [batch]."""
    ordinals = op.Range(1, op.Add(tokens, 1), 1)
    return op.ReduceMax(op.Mul(op.Cast(real, to=DataType.INT64), ordinals), [1], keepdims=0)


def _last_blocks(op: OpBuilder, ends: Value, block: Value, numbers: Value) -> LastBlocks:
    last_blocks = op.Sub(op.Div(op.Add(ends, op.Sub(block, 1)), block), 1)
    return LastBlocks(numbers=op.Max(last_blocks, 0), is_last=op.Equal(numbers, op.Unsqueeze(last_blocks, [1])))


def _short_sequences(op: OpBuilder, parts: Parts, ends: Value, tokens: Value) -> ShortSequences:
    longest = integer_attribute(op, "dense_tokens")
    longest_end = op.ReduceMax(ends, keepdims=0) if parts.by_row else tokens
    shortest_end = op.ReduceMin(ends, keepdims=0) if parts.by_row else tokens
    return ShortSequences(
        longest=longest,
        is_short=op.LessOrEqual(ends, longest),
        all_short=op.LessOrEqual(longest_end, longest),
        any_short=op.LessOrEqual(shortest_end, longest),
    )


def _listed(op: OpBuilder, listed_blocks: Value, first_global: Value, blocks: Value) -> tuple[Value, Value]:
    """Return the listed blocks of each block of queries, and whether they exist: both [1 or heads, blocks, listed].

    Rows beyond the table list nothing, and neither do entries that are not a block of the sequence.
    """
    first_1d, blocks_1d = op.Unsqueeze(first_global, [0]), op.Unsqueeze(blocks, [0])
    padding = op.Concat([0], first_1d, [0, 0], blocks_1d, [0], axis=0)
    padded_table = op.Pad(op.Cast(listed_blocks, to=DataType.INT64), padding, -1)
    table = op.Slice(padded_table, [0], blocks_1d, [1])
    exists = op.And(op.Less(table, blocks), op.Greater(table, -1))
    return op.Where(exists, table, 0), exists
