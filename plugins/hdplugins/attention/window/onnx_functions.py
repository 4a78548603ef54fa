"""Sliding-window attention as function bodies of standard ONNX operators, with memory linear in tokens.

The queries are split into blocks, and each block meets the span of keys that its windows reach: scores are [..., block,
span], never [tokens, tokens]. Two tables hold the tokens of each block and of its span. They are computed from the
length of the sequence: no length needs to be a multiple of anything, and a span is never longer than the sequence. A
head of dilation D is D windows over every D-th token, one per residue class, which is an axis of the tables. Global
tokens are copied after the keys, or gathered where they are, and joined to every span, so that one softmax covers both.

The blocks are computed in two variants. In the batched variant they are one batch of products, which engines fuse; the
size of a block must not depend on the length then, or an engine's bounds multiply to gigabytes of planned memory. In
the blockwise variant they are a loop, one block of one sequence per step, which fits in a CPU's caches at any batch
size: about as fast in ONNX Runtime, with a tenth of the memory. CPU milliseconds and megabytes of growth in ONNX
Runtime 1.31 on two cores, 12 heads of 64, a window of 256 tokens each side:

======  ==========  ==========  ==========================
tokens  batched     blockwise   dense (MultiHeadAttention)
======  ==========  ==========  ==========================
2048    48 (181)    49 (19)     64 (19)
4096    95 (361)    99 (26)     237 (37)
8192    180 (706)   198 (40)    950 (58)
16384   353 (1412)  405 (69)    4368 (114)
======  ==========  ==========  ==========================

With a block of every sequence per step, 8 sequences of 512 tokens took 40 % longer on one core and twice the memory.
Two thirds of the time of the blockwise variant are the two products, at the processor's peak; slicing spans instead of
gathering them, masks computed once for all layers and MultiHeadAttention inside a step gained 5 % at most.

Everything but query, key and value comes from `token_kind`, not from the shapes of these: ONNX Runtime sees then that
all layers of a model need equal tables and masks, and computes them once.
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
    rows_or_zero,
    sequence_sizes,
    steps_of_sequences,
    upcast,
)
from hdplugins.attention.operator import BodyVariant
from hdplugins.op_builder import OpBuilder, float_attribute, integer_attribute, scan

_NOWHERE = 1.0e9
"""The position of a key after the end of its sequence."""


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any], *, grouped: bool = False) -> FunctionBodies:
    """The bodies for nodes with these attributes; a body reads ``left``, ``right`` and ``scale`` from each node.

    ``global_bound`` is the maximum number of global tokens of a sequence; 0 omits the nodes for them. The output for a
    sequence with more is undefined. An engine takes up to 3840. `grouped` says whether key and value have fewer heads
    than query; the shapes of each node say how many. A ValueError says that a dilation is below 1 or missing, or that
    the bound is negative.
    """
    dilation, bound = attributes["dilation"], attributes["global_bound"]
    if not dilation or min(dilation) < 1:
        raise ValueError(
            f"The dilation {list(dilation)} is invalid: give one value of 1 or more per head, or a single one."
        )
    if bound < 0:
        raise ValueError(f"The bound of {bound} global tokens is negative.")
    decided: dict[str, Any] = {"dilation": dilation, "bound": bound, "grouped": grouped}
    return FunctionBodies(
        suffix=_suffix(dilation, bound, grouped),
        batched=bshd_body(partial(_batched, **decided)),
        blockwise=partial(_blockwise, **decided),
    )


def _suffix(dilation: Sequence[int], bound: int, grouped: bool) -> str:
    steps = list(dilation) if len(set(dilation)) > 1 else [dilation[0]]
    suffix = ("_grouped" if grouped else "") + (f"_global{bound}" if bound else "")
    return suffix + ("" if steps == [1] else "_dilation" + "_".join(map(str, steps)))


def _batched(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    token_kind: Value,
    *,
    dilation: Sequence[int],
    bound: int,
    grouped: bool,
) -> Value:
    sequences = _sequences(op, token_kind, bound)
    if sequences.globals_ is not None:
        key, value = _with_globals(op, sequences.globals_, key, value)
    sums = []
    for step, heads in _heads_of_steps(dilation):
        spans = _spans(op, sequences, step, BodyVariant.BATCHED)
        if heads is None:
            rows = _batched_rows(op, sequences, spans, query, key, value, grouped=grouped)
        else:
            states = _states_of_heads(op, heads, query, key, value, grouped=grouped)
            rows = _batched_rows(op, sequences, spans, *states, grouped=False)
        rows = op.Reshape(rows, op.Concat([0, 0, -1], op.Shape(query, start=3), axis=0))
        sums.append(op.Slice(rows, [0], sequences.tokens_1d, [2]))
    # The rows of padding are set to 0: padding may see keys.
    real = op.Unsqueeze(sequences.real, [1, 3])
    return rows_or_zero(op, real, _joined_heads(op, sums, dilation, axis=1))


def _blockwise(
    op: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    token_kind: Value,
    *,
    dilation: Sequence[int],
    bound: int,
    grouped: bool,
) -> Value:
    sequences = _sequences(op, token_kind, bound)
    sums = []
    for step, heads in _heads_of_steps(dilation):
        spans = _spans(op, sequences, step, BodyVariant.BLOCKWISE)
        rows = _blockwise_rows(op, sequences, spans, query, key, value, heads=heads, grouped=grouped)
        rows = op.Reshape(rows, op.Concat([0, -1], op.Shape(rows, start=4), axis=0))
        sums.append(op.Slice(rows, [0], sequences.tokens_1d, [1]))
    return _joined_heads(op, sums, dilation, axis=2)


def _heads_of_steps(dilation: Sequence[int]) -> list[tuple[int, list[int] | None]]:
    """Return each dilation and its heads, None for all heads."""
    steps = sorted(set(dilation))
    if len(steps) == 1:
        return [(steps[0], None)]
    return [(step, [head for head, of_head in enumerate(dilation) if of_head == step]) for step in steps]


@dataclass(frozen=True, kw_only=True)
class _Globals:
    """The global tokens of the sequences.

    Attributes:
        tokens: [batch, bound], the indices of the tokens.
        columns: [bound], the columns of `_Sequences.visible` that say which of them exist.
        bound: the most global tokens of a sequence.
    """

    tokens: Value
    columns: Value
    bound: int


@dataclass(frozen=True, kw_only=True)
class _Sequences(SequenceSizes):
    """What windows of all dilations share.

    Attributes:
        real: [batch, tokens], whether a token is no padding.
        visible: [batch, tokens + bound]: which tokens a window may show, and which of the global columns are filled.
        globals_: the global tokens; None for a bound of 0.
    """

    real: Value
    visible: Value
    globals_: _Globals | None


def _sequences(op: OpBuilder, token_kind: Value, bound: int) -> _Sequences:
    sizes = sequence_sizes(op, token_kind)
    visible = op.Equal(token_kind, op.CastLike(1, token_kind))
    globals_ = None
    if bound:
        # TopK needs at least as many values as it returns, whatever the length of the sequence: hence the padding. The
        # number that it returns is a constant, for engines limit and mishandle a computed one.
        kinds = op.Pad(upcast(op, token_kind), [0, 0, 0, bound])
        top_kinds, top_tokens = op.TopK(kinds, [bound], axis=1, _outputs=2)
        visible = op.Concat(visible, op.Greater(top_kinds, 1.5), axis=1)
        columns = op.Add(op.Range(0, bound, 1), sizes.tokens)
        globals_ = _Globals(tokens=op.Min(top_tokens, sizes.last_token), columns=columns, bound=bound)
    return _Sequences(
        **vars(sizes),
        real=op.Cast(token_kind, to=DataType.BOOL),
        visible=visible,
        globals_=globals_,
    )


def _with_globals(op: OpBuilder, globals_: _Globals, key: Value, value: Value) -> tuple[Value, Value]:
    """Append copies of the rows of the global tokens to both: [batch, kv_heads, tokens + bound, head_dim]."""
    shape = op.Concat(op.Shape(key, end=2), [globals_.bound], op.Shape(key, start=3), axis=0)
    index = op.Expand(op.Unsqueeze(globals_.tokens, [1, 3]), shape)
    keys, values = (op.Concat(state, op.GatherElements(state, index, axis=2), axis=2) for state in (key, value))
    return keys, values


def _heads_1d(op: OpBuilder, state: Value) -> Value:
    return op.Shape(state, start=1, end=2)


def _states_of_heads(
    op: OpBuilder, heads: list[int], query: Value, key: Value, value: Value, *, grouped: bool
) -> tuple[Value, Value, Value]:
    """Pick some heads of the queries, and for each of them its head of the keys."""
    group = op.Div(_heads_1d(op, query), _heads_1d(op, key)) if grouped else None
    key_heads = heads if group is None else op.Div(heads, group)
    return op.Gather(query, heads, axis=1), op.Gather(key, key_heads, axis=1), op.Gather(value, key_heads, axis=1)


def _joined_heads(op: OpBuilder, sums: Sequence[Value], dilation: Sequence[int], *, axis: int) -> Value:
    """Put the heads of all dilations, which are in the order of the dilations, back into order on that axis."""
    if len(sums) == 1:
        return sums[0]
    held = sorted(range(len(dilation)), key=lambda head: dilation[head])  # the sort is stable
    return op.Gather(op.Concat(*sums, axis=axis), [held.index(head) for head in range(len(dilation))], axis=axis)


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """The tokens of each block and of its span. Indices after the end of the sequence continue.

    Attributes:
        blocks: [], the number of blocks.
        queries: [blocks, step, block].
        keys: [blocks, step, span].
        half_reach: [], float32, half the reach of a window in tokens.
        center: [], float32, the tokens from a query to the middle of its window.
    """

    blocks: Value
    queries: Value
    keys: Value
    half_reach: Value
    center: Value


def _spans(op: OpBuilder, sequences: _Sequences, step: int, variant: BodyVariant) -> _Spans:
    """Compute the tables of a dilation. Their rows count the tokens of one residue class.

    A span that would start before the sequence is moved to the start of the sequence, so that a span never needs more
    keys than there are rows. A span may still end after the sequence.
    """
    left, right = integer_attribute(op, "left"), integer_attribute(op, "right")
    reach = op.Add(left, right)
    rows = op.Div(op.Add(sequences.last_token, step), step)
    # Larger blocks copy fewer keys twice and compute more masked scores. In the batched variant a quarter of the reach
    # was best; in the blockwise variant 32 to 256 queries hardly differed in time.
    if variant is BodyVariant.BATCHED:
        block = op.Min(op.Max(op.Mul(op.Div(reach, 256), 64), 64), 256)
    else:
        block = op.Min(rows, 64)
    blocks = op.Add(op.Div(op.Sub(rows, 1), block), 1)
    span = op.Min(op.Add(block, reach), rows)
    block_starts = op.Mul(op.Unsqueeze(op.Range(0, blocks, 1), [1, 2]), block)
    span_starts = op.Max(op.Sub(block_starts, left), 0)
    residues = op.Unsqueeze(op.Range(0, step, 1), [1])

    def tokens(starts: Value, count: Value) -> Value:
        return op.Add(op.Mul(op.Add(starts, op.Range(0, count, 1)), step), residues)

    half_reach = op.Div(upcast(op, op.Mul(reach, step)), 2.0)
    return _Spans(
        blocks=blocks,
        queries=tokens(block_starts, block),
        keys=tokens(span_starts, span),
        half_reach=half_reach,
        center=op.Sub(upcast(op, op.Mul(right, step)), half_reach),
    )


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """Where to gather queries and keys, and which of them belong together.

    The last token replaces tokens after the end of the sequence: such queries are dropped later, and such keys are out
    of reach.

    Attributes:
        queries: [..., block], tokens.
        keys: [..., span], tokens.
        columns: [..., span + bound], these tokens and the global columns as columns of `visible`.
        reached: [..., block, span + bound].
    """

    queries: Value
    keys: Value
    columns: Value
    reached: Value


def _lookup(op: OpBuilder, sequences: _Sequences, spans: _Spans, queries: Value, keys: Value) -> _Lookup:
    """Look up the tokens `queries`, [..., block], and `keys`, [..., span]."""
    key_index = op.Min(keys, sequences.last_token)
    positions = op.Where(op.Less(keys, sequences.tokens), upcast(op, keys), _NOWHERE)
    centers = op.Add(op.Unsqueeze(upcast(op, queries), [-1]), spans.center)
    distances = op.Abs(op.Sub(op.Unsqueeze(positions, [-2]), centers))
    columns = key_index
    if sequences.globals_ is not None:
        # A global token is at distance 0 from every query.
        distances = _appended(op, distances, 0.0, sequences.globals_)
        columns = _appended(op, key_index, sequences.globals_.columns, sequences.globals_)
    return _Lookup(
        queries=op.Min(queries, sequences.last_token),
        keys=key_index,
        columns=columns,
        reached=op.LessOrEqual(distances, spans.half_reach),
    )


def _appended(op: OpBuilder, rows: Value, columns: Value | float, globals_: _Globals) -> Value:
    """Append columns, [bound] or a single number, to each row: [..., row + bound]."""
    shape = op.Concat(op.Shape(rows, end=-1), [globals_.bound], axis=0)
    return op.Concat(rows, op.Expand(columns, shape), axis=-1)


def _sums(
    op: OpBuilder, scaled_query: Value, keys: Value, values: Value, seen: Value, *, axes: int
) -> tuple[Value, Value]:
    """Compute the sums of values, [..., block, head_dim], and whether a query sees a key, [..., block, 1].

    `seen` broadcasts to [..., block, span]. All scores of a query that sees no key are masked: its sum means nothing.
    """
    bias = op.Where(seen, 0.0, MASKED)
    sums = attention(op, scaled_query, keys, values, bias, axes=axes)
    # The masks, which all heads share, are less to look through than the weights.
    return sums, op.Equal(op.ReduceMax(bias, [-1]), 0.0)


# With fewer heads of keys than of queries, heads are two axes, [kv_heads, group]: keys and values have 1 in place of
# the group, so that products broadcast and nothing is copied for each head.


def _batched_rows(
    op: OpBuilder, sequences: _Sequences, spans: _Spans, query: Value, key: Value, value: Value, *, grouped: bool
) -> Value:
    """Compute [batch, heads, blocks, block, step, head_dim]: tokens in order, and some after the sequence.

    The states are [batch, heads, tokens, head_dim].
    """
    scale = op.CastLike(float_attribute(op, "scale"), query)
    lookup = _lookup(op, sequences, spans, spans.queries, spans.keys)
    visible = op.Gather(sequences.visible, lookup.columns, axis=1)
    seen = op.And(op.Unsqueeze(visible, [1, 2, -2] if grouped else [1, -2]), lookup.reached)
    queries = query
    if grouped:
        queries = op.Reshape(query, op.Concat([0], _heads_1d(op, key), [-1], op.Shape(query, start=2), axis=0))
    block_query = op.Gather(queries, lookup.queries, axis=2 + grouped)
    block_keys, block_values = (op.Gather(state, lookup.columns, axis=2) for state in (key, value))
    if grouped:
        block_keys, block_values = (op.Unsqueeze(state, [2]) for state in (block_keys, block_values))
    sums, sees_any = _sums(op, op.Mul(block_query, scale), block_keys, block_values, seen, axes=6 + grouped)
    sums = op.Mul(sums, op.CastLike(sees_any, sums))
    if grouped:
        sums = op.Reshape(sums, op.Concat([0], _heads_1d(op, query), op.Shape(sums, start=3), axis=0))
    return op.Transpose(sums, perm=[0, 1, 2, 4, 3, 5])


def _blockwise_rows(
    op: OpBuilder,
    sequences: _Sequences,
    spans: _Spans,
    query: Value,
    key: Value,
    value: Value,
    *,
    heads: list[int] | None,
    grouped: bool,
) -> Value:
    """Compute [batch, blocks, block, step, heads, head_dim]: tokens in order, and some after the sequence.

    The states are [batch, tokens, heads, head_dim]; `heads` are the queries' heads to compute, None for all.
    """
    scale = op.CastLike(float_attribute(op, "scale"), query)
    num_heads, num_key_heads = (op.Squeeze(op.Shape(state, start=2, end=3)) for state in (query, key))
    with_groups = grouped and heads is None
    head_numbers = op.Range(0, num_heads, 1) if heads is None else heads
    key_numbers = head_numbers
    if with_groups:
        head_numbers = op.Reshape(head_numbers, op.Concat(op.Shape(key, start=2, end=3), [-1], axis=0))
        key_numbers = op.Unsqueeze(op.Range(0, num_key_heads, 1), [1])
    elif grouped:
        key_numbers = op.Div(heads, op.Div(num_heads, num_key_heads))
    head_columns, key_columns = (op.Unsqueeze(numbers, [-2, -1]) for numbers in (head_numbers, key_numbers))
    # States as rows: row (sequence * tokens + token) * heads + head.
    rows_shape = op.Concat([-1], op.Shape(query, start=3), axis=0)
    all_queries, all_keys, all_values = (op.Reshape(state, rows_shape) for state in (query, key, value))

    def attend(op: OpBuilder, sequence: Value, query_tokens: Value, key_tokens: Value) -> Value:
        lookup = _lookup(op, sequences, spans, query_tokens, key_tokens)
        key_index = lookup.keys
        if sequences.globals_ is not None:
            sequence_globals = op.Gather(sequences.globals_.tokens, sequence, axis=0)
            key_index = _appended(op, key_index, sequence_globals, sequences.globals_)
        visible = op.Gather(op.Gather(sequences.visible, sequence, axis=0), lookup.columns, axis=0)
        seen = op.And(op.Unsqueeze(visible, [-2]), lookup.reached)
        first_token = op.Mul(sequence, sequences.tokens)

        def rows_of(tokens: Value, heads: Value, numbers: Value) -> Value:
            return op.Add(op.Mul(op.Add(tokens, first_token), heads), numbers)

        block_query = op.Gather(all_queries, rows_of(lookup.queries, num_heads, head_columns), axis=0)
        key_rows = rows_of(key_index, num_key_heads, key_columns)
        block_keys, block_values = (op.Gather(rows, key_rows, axis=0) for rows in (all_keys, all_values))
        scaled_query = op.Mul(block_query, scale)
        sums, sees_any = _sums(op, scaled_query, block_keys, block_values, seen, axes=4 + with_groups)
        if with_groups:
            sums = op.Reshape(sums, op.Concat([-1], op.Shape(sums, start=2), axis=0))
        # The rows of padding are set to 0: padding may see keys.
        real = op.Gather(op.Gather(sequences.real, sequence, axis=0), lookup.queries, axis=0)
        outputs = rows_or_zero(op, op.And(sees_any, op.Unsqueeze(real, [-1])), sums)
        return upcast(op, op.Transpose(outputs, perm=[2, 1, 0, 3]))

    step_sequences, _ = steps_of_sequences(op, sequences.batch_1d, spans.blocks)
    repeats = op.Concat(sequences.batch_1d, [1, 1], axis=0)
    queries, keys = (op.Tile(table, repeats) for table in (spans.queries, spans.keys))
    scanned = scan(op, attend, step_sequences, queries, keys, shapes=[("block", "step", "heads", "head_dim")])
    sums = op.CastLike(scanned, query)
    return op.Reshape(sums, op.Concat(sequences.batch_1d, [-1], op.Shape(sums, start=1), axis=0))
