"""What both orders of sliding-window attention are made of, as ONNX text."""

from __future__ import annotations

__all__ = ["CLOSING", "ROWS", "attention", "find_globals", "heads_of_step", "shared", "tables"]

from collections.abc import Sequence


def shared(*, bound: int, appended: bool) -> str:
    """Text that makes what all steps share: `visible`, [batch, tokens + bound], `keys` and `values`.

    Args:
        bound: the most global tokens of a text; 0 leaves out all that they need.
        appended: whether the global tokens' keys and values are copied behind the others'.
    """
    text = _SHARED + (_GLOBALS.format(bound=bound) if bound else _NO_GLOBALS)
    return text + (_APPENDED_GLOBALS if bound and appended else _KEYS_AS_THEY_ARE)


def tables(*, step: int, block_size: str) -> str:
    """Text that makes `query_table`, [blocks, step, block], and `key_table`, [blocks, step, span], of a step.

    Args:
        step: tokens of a step.
        block_size: text that makes `block`.
    """
    return _TABLES.format(step=step, block_size=block_size)


def attention(*, gather: str, bound: int, axes: int) -> str:
    """Text of attention of the queries `query_tokens`, [..., block], over the keys `key_tokens`, [..., span].

    Args:
        gather: text that makes of `query_index` and `source_index` what they name: `block_query`, [..., block,
            head_dim], `block_key` and `block_value`, [..., span, head_dim], and `key_mask`, [..., 1, span].
        bound: the most global tokens of a text.
        axes: of `block_query`.
    """
    join_globals = _JOIN_GLOBALS.format(bound=bound) if bound else _JOIN_NO_GLOBALS
    swap = [*range(axes - 2), axes - 1, axes - 2]
    return _ATTENTION.format(join_globals=join_globals, gather=gather, transposition=swap)


def find_globals(bound: int) -> str:
    """Text that makes `found_index` of `source_index`, for one text: where its keys are without appended ones."""
    return _FIND_GLOBALS if bound else _FIND_NO_GLOBALS


def heads_of_step(heads: Sequence[int] | None, *, grouped: bool) -> str:
    """Text that makes `step_query`, `step_keys` and `step_values`, [batch, heads, tokens, head_dim].

    Args:
        heads: of the queries, in their order; None for all.
        grouped: whether there are fewer heads of keys. Those of some heads are as many as these.
    """
    if heads is None:
        return _ALL_HEADS
    return _SOME_HEADS.format(heads=list(heads), key_heads=_HEADS_OF_GROUPS if grouped else _HEADS_OF_KEYS)


# `visible` is [batch, tokens + bound]: which tokens a window may show, and which of the global columns are filled.
_SHARED = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    last_axis = Constant <value_ints = [-1]> ()
    axis_before_last = Constant <value_ints = [-2]> ()
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
# runtime meets inf - inf, and exp() of them is exactly 0 beside a real score; where there is none, a product makes
# the sum 0. Its factor comes from the masks, which all heads share.
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
    all_sums = MatMul (typed_weights, block_value)
    largest_bias = ReduceMax (bias, last_axis)
    sees_any = Equal (largest_bias, unmasked_score)
    answered = CastLike (sees_any, query)
    block_sums = Mul (all_sums, answered)
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

# row_sums are [batch, heads, blocks, block, step, head_dim]: the tokens in order, and some behind the end of the text.
ROWS = """
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
    {key_heads}
    step_query = Gather <axis = 1> (query, heads)
    step_keys = Gather <axis = 1> (keys, key_heads)
    step_values = Gather <axis = 1> (values, key_heads)
"""

_HEADS_OF_KEYS = """
    key_heads = Identity (heads)
"""

_HEADS_OF_GROUPS = """
    all_query_heads = Shape <start = 1, end = 2> (query)
    all_key_heads = Shape <start = 1, end = 2> (keys)
    group = Div (all_query_heads, all_key_heads)
    key_heads = Div (heads, group)
"""

# Padding needs a rule of its own, since it may see keys. Where, not a product: the sums of padded queries may be
# anything.
CLOSING = """
    real = Cast <to = 9> (token_kind)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    zero_value = Constant <value_float = 0.0> ()
    nothing = CastLike (zero_value, query)
    attended = Where (real_rows, joined, nothing)
"""
