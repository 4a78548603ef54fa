"""Sliding-window attention as function bodies of standard ONNX operators, with memory linear in tokens.

The queries are cut into blocks, and each block meets the span of keys that its windows reach: scores are [..., block,
span], never [tokens, tokens]. Two tables say which tokens make a block and its span. They are computed from the length
of the text: no length needs to be a multiple of anything, and a span is never longer than the text. A head of dilation
D is D windows over every D-th token, one per residue class: an axis of the tables. Global tokens are copied behind the
keys, or found where they are, and joined to every span, so that one softmax covers both.

The blocks come in two orders. In parallel they are one batch of products, which TensorRT fuses; the size of a block
must not depend on the length then, or TensorRT's bounds multiply to gigabytes of planned memory. Sequentially they are
a Scan, one block of one text per step, which fits in a CPU's caches at any batch size: about as fast in ONNX Runtime,
with a tenth of the memory. CPU milliseconds and megabytes of growth in ONNX Runtime 1.31 on two cores, 12 heads of 64,
a window of 256 tokens each side:

======  ==========  ==========  ==========================
tokens  parallel    sequential  dense (MultiHeadAttention)
======  ==========  ==========  ==========================
2048    48 (181)    49 (19)     64 (19)
4096    95 (361)    99 (26)     237 (37)
8192    180 (706)   198 (40)    950 (58)
16384   353 (1412)  405 (69)    4368 (114)
======  ==========  ==========  ==========================

With a block of every text per step, 8 texts of 512 tokens took 40 % longer on one core and twice the memory. Two thirds
of the sequential time are the two products, at the processor's peak; slicing spans instead of gathering them, masks
computed once for all layers and MultiHeadAttention inside a step gained 5 % at most.

Everything but query, key and value comes from `token_kind`, not from their shapes: ONNX Runtime sees then that all
layers of a model need the same tables and masks, and computes them once.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from hdplugins.operators.onnx_text import BlockOrder, function, nodes_of
from hdplugins.operators.sliding_window_attention import OPERATOR

_NAME, _INPUTS, _ATTRIBUTES = OPERATOR.name, OPERATOR.inputs, OPERATOR.attributes


def function_of_node(
    *, inputs: int, attributes: Mapping[str, Any], order: BlockOrder = BlockOrder.PARALLEL
) -> onnx.FunctionProto:
    """The body for a node of the portable graph, and for others of that name.

    Bodies that differ need names that differ. Overloads of one name would be the standard's way, but TensorRT-RTX 1.7.1
    gives every node the first overload without warning.

    Args:
        inputs: of the node; 4.
        attributes: of the node; ``left``, ``right`` and ``scale`` are read from each. ``global_bound`` is the most
            global tokens that a text may hold; 0 leaves out all that they need. The answer for a text with more is
            undefined. TensorRT takes up to 3840.
        order: of the blocks.

    Raises:
        ValueError: another number of inputs, a dilation below 1, none at all, or a negative bound.
    """
    if inputs != len(_INPUTS):
        raise ValueError(f"{_NAME} has {len(_INPUTS)} inputs, not {inputs}.")
    dilation, bound = attributes["dilation"], attributes["global_bound"]
    if not dilation or min(dilation) < 1:
        raise ValueError(
            f"The dilation {list(dilation)} is invalid: give one value of 1 or more per head, or a single one."
        )
    if bound < 0:
        raise ValueError(f"The bound of {bound} global tokens is negative.")
    text = _SHARED + (_GLOBALS.format(bound=bound) if bound else _NO_GLOBALS)
    # A step of a Scan reads one text, so its global tokens are found where they are.
    text += _APPENDED_GLOBALS if bound and order is BlockOrder.PARALLEL else _KEYS_AS_THEY_ARE
    nodes = _nodes(text)
    steps = sorted(set(dilation))
    for step in steps:
        heads = [head for head, of_head in enumerate(dilation) if of_head == step] if len(steps) > 1 else None
        nodes += _nodes_of_step(step, heads, global_bound=bound, order=order)
    nodes += _nodes(_join_of_heads(dilation) + _CLOSING)
    return function(OPERATOR, nodes, suffix=_suffix(dilation, bound), inputs=inputs)


# `visible` is [batch, tokens + bound]: which tokens a window may show, and which of the global columns are filled.
_SHARED = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    last_axis = Constant <value_ints = [-1]> ()
    axis_before_last = Constant <value_ints = [-2]> ()
    mask_axes = Constant <value_ints = [1, -2]> ()
    two = Constant <value_float = 2.0> ()
    nowhere = Constant <value_float = 1.0e9> ()
    left = Constant <value_int: int = @left> ()
    right = Constant <value_int: int = @right> ()
    reach = Add (left, right)
    scale = Constant <value_float: float = @scale> ()
    typed_scale = CastLike (scale, query)
    kind_shape = Shape (token_kind)
    tokens = Gather (kind_shape, one)
    last_token = Sub (tokens, one)
    local_kind = Constant <value = int32 {1}> ()
    local = Equal (token_kind, local_kind)
"""

_NO_GLOBALS = """
    visible = Identity (local)
"""

# TopK needs at least as many values as it returns, whatever the length of the text: hence the padding. Its
# number is a constant, for TensorRT limits and mishandles a computed one.
_GLOBALS = """
    bound = Constant <value_int = {bound}> ()
    bound_shape = Constant <value_ints = [{bound}]> ()
    kind_padding = Constant <value_ints = [0, 0, 0, {bound}]> ()
    kind_numbers = Cast <to = 1> (token_kind)
    padded_kinds = Pad (kind_numbers, kind_padding)
    top_kinds, top_tokens = TopK <axis = 1> (padded_kinds, bound_shape)
    above_local = Constant <value_float = 1.5> ()
    filled = Greater (top_kinds, above_local)
    visible = Concat <axis = 1> (local, filled)
    global_tokens = Min (top_tokens, last_token)
    bound_range = Range (zero, bound, one)
    global_places = Add (bound_range, tokens)
"""

_KEYS_AS_THEY_ARE = """
    keys = Identity (key)
    values = Identity (value)
"""

_APPENDED_GLOBALS = """
    index_axes = Constant <value_ints = [1, 3]> ()
    token_index = Unsqueeze (global_tokens, index_axes)
    batch_and_heads = Shape <start = 0, end = 2> (key)
    key_dim = Shape <start = 3, end = 4> (key)
    global_shape = Concat <axis = 0> (batch_and_heads, bound_shape, key_dim)
    global_index = Expand (token_index, global_shape)
    global_keys = GatherElements <axis = 2> (key, global_index)
    global_values = GatherElements <axis = 2> (value, global_index)
    keys = Concat <axis = 2> (key, global_keys)
    values = Concat <axis = 2> (value, global_values)
"""

# Rows count the tokens of a residue class. A span that would begin before the text is moved to its beginning, so that
# a span never needs more keys than there are rows; one may still end behind the text. query_table is
# [blocks, step, block], key_table is [blocks, step, span].
_TABLES = """
    step = Constant <value_int = {step}> ()
    rounded_up = Add (last_token, step)
    rows = Div (rounded_up, step)
    {block_size}
    last_row = Sub (rows, one)
    last_block = Div (last_row, block)
    blocks = Add (last_block, one)
    whole_span = Add (block, reach)
    span = Min (whole_span, rows)
    block_numbers = Range (zero, blocks, one)
    table_axes = Constant <value_ints = [1, 2]> ()
    block_column = Unsqueeze (block_numbers, table_axes)
    block_starts = Mul (block_column, block)
    window_starts = Sub (block_starts, left)
    span_starts = Max (window_starts, zero)
    block_range = Range (zero, block, one)
    query_rows = Add (block_starts, block_range)
    span_range = Range (zero, span, one)
    key_rows = Add (span_starts, span_range)
    residue_range = Range (zero, step, one)
    residues = Unsqueeze (residue_range, axis_1)
    query_steps = Mul (query_rows, step)
    query_table = Add (query_steps, residues)
    key_steps = Mul (key_rows, step)
    key_table = Add (key_steps, residues)
    token_reach = Mul (reach, step)
    reach_number = Cast <to = 1> (token_reach)
    half_reach = Div (reach_number, two)
    token_right = Mul (right, step)
    right_number = Cast <to = 1> (token_right)
    center = Sub (right_number, half_reach)
"""

# Attention of the queries query_tokens, [..., block], over the keys key_tokens, [..., span], for any leading axes. What
# they are gathered from, all texts or one, differs with the order. The last token stands in for those behind the end of
# the text: as queries they are dropped later, as keys they are nowhere near. Masked scores are finite, so that no
# runtime meets inf - inf, and exp() of them is exactly 0 beside a real score.
_ATTENTION = """
    query_index = Min (query_tokens, last_token)
    key_index = Min (key_tokens, last_token)
    key_exists = Less (key_tokens, tokens)
    query_numbers = Cast <to = 1> (query_tokens)
    key_numbers = Cast <to = 1> (key_tokens)
    key_places = Where (key_exists, key_numbers, nowhere)
    key_row = Unsqueeze (key_places, axis_before_last)
    query_column = Unsqueeze (query_numbers, last_axis)
    centers = Add (query_column, center)
    offsets = Sub (key_row, centers)
    window_distances = Abs (offsets)
    {join_globals}
    reached = LessOrEqual (distances, half_reach)
    {gather}
    mask = And (key_mask, reached)
    unmasked_score = Constant <value_float = 0.0> ()
    masked_score = Constant <value_float = -1.0e30> ()
    bias = Where (mask, unmasked_score, masked_score)
    scaled_query = Mul (block_query, typed_scale)
    transposed_key = Transpose <perm = {transposition}> (block_key)
    products = MatMul (scaled_query, transposed_key)
    scores = Cast <to = 1> (products)
    masked_scores = Add (scores, bias)
    weights = Softmax <axis = -1> (masked_scores)
    typed_weights = CastLike (weights, query)
    block_sums = MatMul (typed_weights, block_value)
"""

_JOIN_NO_GLOBALS = """
    source_index = Identity (key_index)
    distances = Identity (window_distances)
"""

# A global token is at distance 0 from every query. The constants are made again here, for ONNX Runtime does not share
# those of several layers that a Scan uses, and with them all that is computed from them.
_JOIN_GLOBALS = """
    columns_shape = Constant <value_ints = [{bound}]> ()
    no_distance = Constant <value_float = 0.0> ()
    index_shape = Shape <end = -1> (key_index)
    column_index_shape = Concat <axis = 0> (index_shape, columns_shape)
    column_index = Expand (global_places, column_index_shape)
    source_index = Concat <axis = -1> (key_index, column_index)
    outer_shape = Shape <end = -1> (window_distances)
    no_distance_shape = Concat <axis = 0> (outer_shape, columns_shape)
    no_distances = Expand (no_distance, no_distance_shape)
    distances = Concat <axis = -1> (window_distances, no_distances)
"""

_FIND_NO_GLOBALS = """
    found_index = Identity (key_index)
"""

_FIND_GLOBALS = """
    text_globals = Gather <axis = 0> (global_tokens, text)
    global_columns = Expand (text_globals, column_index_shape)
    found_index = Concat <axis = -1> (key_index, global_columns)
"""

# Larger blocks copy fewer keys twice and compute more masked scores. In parallel a quarter of the reach was best; in
# sequence 32 to 256 queries hardly differed in time.
_BLOCK_SIZE = {
    BlockOrder.PARALLEL: """
    quarter = Constant <value_int = 256> ()
    smallest_block = Constant <value_int = 64> ()
    largest_block = Constant <value_int = 256> ()
    quarters = Div (reach, quarter)
    quarter_reach = Mul (quarters, smallest_block)
    at_least = Max (quarter_reach, smallest_block)
    block = Min (at_least, largest_block)
""",
    BlockOrder.SEQUENTIAL: """
    largest_block = Constant <value_int = 64> ()
    block = Min (largest_block, rows)
""",
}

_GATHER = {
    BlockOrder.PARALLEL: """
    visible_keys = Gather <axis = 1> (visible, source_index)
    key_mask = Unsqueeze (visible_keys, mask_axes)
    block_query = Gather <axis = 2> (step_query, query_index)
    block_key = Gather <axis = 2> (step_keys, source_index)
    block_value = Gather <axis = 2> (step_values, source_index)
""",
    # Rows of all heads of all texts are numbered through, so that nothing of other texts is copied.
    BlockOrder.SEQUENTIAL: """
    visible_tokens = Gather <axis = 0> (visible, text)
    visible_keys = Gather <axis = 0> (visible_tokens, source_index)
    key_mask = Unsqueeze (visible_keys, axis_before_last)
    first_head = Mul (text, num_heads)
    text_heads = Add (first_head, head_numbers)
    first_rows = Mul (text_heads, tokens)
    head_queries = Add (first_rows, query_index)
    {find_globals}
    head_keys = Add (first_rows, found_index)
    block_query = Gather <axis = 0> (all_queries, head_queries)
    block_key = Gather <axis = 0> (all_keys, head_keys)
    block_value = Gather <axis = 0> (all_values, head_keys)
""",
}

_IN_ORDER = {
    # block_sums are [batch, heads, blocks, step, block, head_dim].
    BlockOrder.PARALLEL: """
    query_tokens = Identity (query_table)
    key_tokens = Identity (key_table)
    {attention}
    row_sums = Transpose <perm = [0, 1, 2, 4, 3, 5]> (block_sums)
""",
    # A step is one block of one text. scanned_sums are [batch * blocks, heads, step, block, head_dim], float32 because
    # a Scan must declare a type.
    BlockOrder.SEQUENTIAL: """
    batch = Gather (kind_shape, zero)
    head_shape = Shape <start = 1, end = 2> (step_query)
    num_heads = Squeeze (head_shape)
    head_range = Range (zero, num_heads, one)
    head_numbers = Unsqueeze (head_range, table_axes)
    any_number = Constant <value_ints = [-1]> ()
    dim = Shape <start = 3, end = 4> (query)
    all_rows_shape = Concat <axis = 0> (any_number, dim)
    all_queries = Reshape (step_query, all_rows_shape)
    all_keys = Reshape (step_keys, all_rows_shape)
    all_values = Reshape (step_values, all_rows_shape)
    all_blocks = Mul (batch, blocks)
    scan_steps = Range (zero, all_blocks, one)
    texts = Div (scan_steps, blocks)
    once = Constant <value_ints = [1, 1]> ()
    batch_shape = Unsqueeze (batch, axis_0)
    repeats = Concat <axis = 0> (batch_shape, once)
    query_tables = Tile (query_table, repeats)
    key_tables = Tile (key_table, repeats)
    scanned_sums = Scan <num_scan_inputs = 3, body = attend (
        int64 text, int64[step, block] query_tokens, int64[step, span] key_tokens
    ) => (float[heads, step, block, head_dim] wide_sums) {{
        {attention}
        wide_sums = Cast <to = 1> (block_sums)
    }}> (texts, query_tables, key_tables)
    typed_sums = CastLike (scanned_sums, query)
    blocks_shape = Unsqueeze (blocks, axis_0)
    block_shape = Shape <start = 1> (typed_sums)
    text_shape = Concat <axis = 0> (batch_shape, blocks_shape, block_shape)
    text_sums = Reshape (typed_sums, text_shape)
    row_sums = Transpose <perm = [0, 2, 1, 4, 3, 5]> (text_sums)
""",
}

_TRANSPOSITION = {BlockOrder.PARALLEL: [0, 1, 2, 3, 5, 4], BlockOrder.SEQUENTIAL: [0, 1, 3, 2]}

# row_sums are [batch, heads, blocks, block, step, head_dim]: the tokens in order, and some behind the end of the text.
_ROWS = """
    row_axes = Constant <value_ints = [0, 0, -1]> ()
    head_dim = Shape <start = 3, end = 4> (query)
    row_shape = Concat <axis = 0> (row_axes, head_dim)
    rows_and_more = Reshape (row_sums, row_shape)
    end = Unsqueeze (tokens, axis_0)
    sums = Slice (rows_and_more, axis_0, end, axis_2)
"""

_ALL_HEADS = """
    step_query = Identity (query)
    step_keys = Identity (keys)
    step_values = Identity (values)
"""

_SOME_HEADS = """
    heads = Constant <value_ints = {heads}> ()
    step_query = Gather <axis = 1> (query, heads)
    step_keys = Gather <axis = 1> (keys, heads)
    step_values = Gather <axis = 1> (values, heads)
"""

# Only padding needs a separate rule, since every real query sees at least itself. Where, not a product: the sums of
# padded queries may be anything.
_CLOSING = """
    real = Cast <to = 9> (token_kind)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    zero_value = Constant <value_float = 0.0> ()
    nothing = CastLike (zero_value, query)
    attended = Where (real_rows, joined, nothing)
"""


def _nodes_of_step(step: int, heads: list[int] | None, *, global_bound: int, order: BlockOrder) -> list[onnx.NodeProto]:
    """The nodes that make ``sums_<step>`` of the given heads, None for all."""
    join_globals = _JOIN_GLOBALS.format(bound=global_bound) if global_bound else _JOIN_NO_GLOBALS
    gather = _GATHER[order].format(find_globals=_FIND_GLOBALS if global_bound else _FIND_NO_GLOBALS)
    attention = _ATTENTION.format(join_globals=join_globals, gather=gather, transposition=_TRANSPOSITION[order])
    text = _TABLES.format(step=step, block_size=_BLOCK_SIZE[order])
    text += _ALL_HEADS if heads is None else _SOME_HEADS.format(heads=heads)
    text += _IN_ORDER[order].format(attention=attention) + _ROWS
    nodes = _nodes(text)
    _add_suffix(nodes, f"_{step}", set())
    return nodes


def _suffix(dilation: Sequence[int], global_bound: int) -> str:
    steps = list(dilation) if len(set(dilation)) > 1 else [dilation[0]]
    of_globals = f"_global{global_bound}" if global_bound else ""
    return of_globals + ("" if steps == [1] else "_dilation" + "_".join(map(str, steps)))


def _join_of_heads(dilation: Sequence[int]) -> str:
    """Text that puts the heads of all steps back into their order."""
    steps = sorted(set(dilation))
    if len(steps) == 1:
        return f"joined = Identity (sums_{steps[0]})\n"
    # A stable sort by step is the order in which the steps hold the heads.
    order = sorted(range(len(dilation)), key=lambda head: dilation[head])
    places = [order.index(head) for head in range(len(dilation))]
    return f"""
    sums = Concat <axis = 1> ({", ".join(f"sums_{step}" for step in steps)})
    places = Constant <value_ints = {places}> ()
    joined = Gather <axis = 1> (sums, places)
"""


def _nodes(text: str) -> list[onnx.NodeProto]:
    return nodes_of(text, inputs=_INPUTS, attributes=_ATTRIBUTES)


def _add_suffix(nodes: Sequence[onnx.NodeProto], suffix: str, names: set[str]) -> None:
    """Rename, in place, the values in ``names`` and those that the nodes themselves make."""
    names = names | {name for node in nodes for name in node.output}
    for node in nodes:
        node.input[:] = [name + suffix if name in names else name for name in node.input]
        node.output[:] = [name + suffix for name in node.output]
        for graph in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
            _add_suffix(graph.node, suffix, names | {value.name for value in graph.input})
            for value in (*graph.input, *graph.output):
                value.name += suffix
