"""Sliding-window attention: a sequential body on a CPU, blocks against spans in OpenVINO.

In ONNX Runtime on a CPU, the blocks are computed one after another, or all keys at once where a window covers the text.
A text without padding, no longer than a window's reach on its shorter side and the query itself, is attended to densely
by definition. The fused attention does that in half to two thirds of the time that the blocks take: CPU milliseconds in
ONNX Runtime 1.31.1 on one core of an AMD EPYC, 12 heads of 64, batch 1, the window as wide as it takes:

======  ======  =====
tokens  blocks  fused
======  ======  =====
64      0.17    0.10
257     2.0     1.1
1024    21      15
2048    92      59
======  ======  =====

In OpenVINO, blocks of queries attend to the span of keys that their windows reach. All blocks of all texts are one
batch of the standard's ``Attention``, which OpenVINO fuses with its mask. The tokens of a block, the tokens of its
span, and the mask are made once for all layers alike; a layer copies the rows of its states by these tables. Whatever
counts tokens is an integer: in bfloat16, OpenVINO rounds numbers above 256.
"""

from __future__ import annotations

__all__ = ["LOWERING"]

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hdexport.lowering.lowering import Lowering, SharedParts
from hdexport.lowering.multi_head_attention import (
    Insertion,
    merge_heads,
    replace_by_merged,
    states_tokens_first,
)
from hdexport.lowering.nodes import attributes_of, body_of, group_of
from hdexport.lowering.openvino_functions import DOMAIN, SharedTables, add_function
from hdexport.lowering.short_texts import ShortTexts
from hdplugins.attention.operator import BlockOrder
from hdruntime.constants import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir

_TOKEN_KIND = 3
"""Position of that input: [batch, tokens], 0 for padding, 1 for local tokens, 2 for global ones, -1 for unseen ones."""

_BLOCK = 256
"""Queries of a block, at most. Larger blocks copy fewer keys twice, and compute more scores that are masked."""


class _WindowLowering(Lowering):
    """Sequential bodies, or all keys at once where a window covers the text; blocks against spans in OpenVINO."""

    operator = "SlidingWindowAttention"
    fused: ClassVar = {OPENVINO_LOWERING: ("float32",)}
    fuses_short_texts = True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        import onnx_ir as ir

        function = ir.serde.deserialize_function(body_of(node, BlockOrder.SEQUENTIAL))
        assert function.identifier() == node.op_identifier()
        parts.model.functions[function.identifier()] = function
        attributes, name = attributes_of(node), parts.new_name("window")
        # However short the text, a dilated head does not see all of it.
        if max(attributes["dilation"]) == 1:
            longest = min(attributes["left"], attributes["right"]) + 1
            parts.once(ShortTexts, ShortTexts).fuse(node, longest=longest, name=name)

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        tables = parts.once(SharedTables, lambda: SharedTables(parts.model))
        parts.once(_ATTEND, lambda: _add_functions(parts))
        insertion = Insertion(node)
        attributes, token_kind = attributes_of(node), node.inputs[_TOKEN_KIND]
        assert token_kind is not None
        assert node.inputs[0] is not None
        assert node.inputs[0].shape is not None
        heads = int(node.inputs[0].shape[1])
        dilation = list(attributes["dilation"])
        steps = dilation * (heads // len(dilation))
        states, group = states_tokens_first(insertion, node), group_of(node)
        reach = {"left": attributes["left"], "right": attributes["right"]}
        text = _table_text(attributes["global_bound"])
        merged = []
        for step in sorted(set(steps)):
            of_step = [head for head in range(heads) if steps[head] == step]
            chosen, shared = states, group
            if len(of_step) != heads:
                chosen, shared = _states_of(insertion, states, of_step, group), 1
            table = tables.of(insertion, text, [token_kind], outputs=4, attributes={**reach, "step": step})
            if shared > 1:
                *rows, bias, answers = table
                table = [*rows, *tables.of(insertion, _TILED.format(group=shared), [bias], outputs=1), answers]
            name = _FUNCTION_OF_GROUPS if shared > 1 else _FUNCTION
            merged.append(_attended(insertion, name, chosen, table, token_kind, step=step, scale=attributes["scale"]))
        attended = merged[0] if len(merged) == 1 else _joined(insertion, merged, steps)
        replace_by_merged(insertion, node, merge_heads(insertion, attended))
        return True


LOWERING = _WindowLowering()


def _add_functions(parts: SharedParts) -> None:
    """Add the functions of attention; batches may have padding, or queries that see no key: their rows are 0."""
    answered = _ANSWERED if parts.padded else _ALL_ANSWERED
    add_function(parts.model, _ATTEND.format(name=_FUNCTION, answered=answered, **_ALONE))
    add_function(parts.model, _ATTEND.format(name=_FUNCTION_OF_GROUPS, answered=answered, **_GROUPED))


def _table_text(bound: int) -> str:
    """The function that makes rows of the queries and keys of a block, their mask, and which queries are answered."""
    joined = _JOINED_GLOBALS.format(bound=bound) if bound else _NO_GLOBALS
    return _TABLE.format(name=f"WindowTables_global{bound}", block=_BLOCK, joined=joined)


def _states_of(
    insertion: Insertion, states: Sequence[onnx_ir.Value], heads: Sequence[int], group: int
) -> list[onnx_ir.Value]:
    """The states of some heads of queries, each with keys and values of its own."""
    query, *others = states
    own = [head // group for head in heads]
    return [_heads(insertion, query, heads), *(_heads(insertion, state, own) for state in others)]


def _heads(insertion: Insertion, state: onnx_ir.Value, heads: Sequence[int]) -> onnx_ir.Value:
    """Some heads of [batch, tokens, heads, head_dim]."""
    return insertion.op("Gather", [state, insertion.integers(heads)], {"axis": 2})


def _attended(
    insertion: Insertion,
    name: str,
    states: Sequence[onnx_ir.Value],
    table: Sequence[onnx_ir.Value],
    token_kind: onnx_ir.Value,
    *,
    step: int,
    scale: float,
) -> onnx_ir.Value:
    """[batch, tokens, heads, head_dim], like the states."""
    import onnx_ir as ir

    attributes = {"step": step, "scale": scale}
    return insertion.insert(ir.node(name, [*states, *table, token_kind], attributes=attributes, domain=DOMAIN))


def _joined(insertion: Insertion, of_steps: Sequence[onnx_ir.Value], steps: Sequence[int]) -> onnx_ir.Value:
    """The heads of all steps, [batch, tokens, heads, head_dim], in their order."""
    joined = insertion.op("Concat", of_steps, {"axis": 2})
    # A stable sort by step is the order in which the steps hold the heads.
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return _heads(insertion, joined, [order.index(head) for head in range(len(steps))])


# A block of heads that share keys is that of each of them after the other.
_TILED = """WindowBiasOfGroup{group} (bias) => (tiled) {{
    copies = Constant <value_ints = [1, 1, {group}, 1]> ()
    tiled = Tile (bias, copies)
}}"""

# A row is every step-th token, one sequence per residue. Blocks are as many as there must be, and of one size. A span
# that would begin before the text, or end behind it, is moved: so it is never longer than the text, and a text of one
# block is attended to densely. query_rows are [blocks, block], key_rows [blocks, span].
_TABLE = """{name} <left, right, step> (token_kind) => (query_index, key_index, bias, answers) {{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    any_1d = Constant <value_ints = [-1]> ()
    left = Constant <value_int: int = @left> ()
    right = Constant <value_int: int = @right> ()
    step = Constant <value_int: int = @step> ()
    largest = Constant <value_int = {block}> ()
    batch_1d = Shape <start = 0, end = 1> (token_kind)
    batch = Squeeze (batch_1d)
    tokens_1d = Shape <start = 1, end = 2> (token_kind)
    tokens = Squeeze (tokens_1d)
    last_token = Sub (tokens, one)
    rounded_tokens = Add (last_token, step)
    rows = Div (rounded_tokens, step)
    last_row = Sub (rows, one)
    last_block = Div (last_row, largest)
    blocks = Add (last_block, one)
    rounded_rows = Add (last_row, blocks)
    block = Div (rounded_rows, blocks)
    reach = Add (left, right)
    whole_span = Add (block, reach)
    span = Min (whole_span, rows)
    numbers = Range (zero, blocks, one)
    number_column = Unsqueeze (numbers, one_1d)
    block_starts = Mul (number_column, block)
    window_starts = Sub (block_starts, left)
    last_start = Sub (rows, span)
    starts_in_text = Min (window_starts, last_start)
    span_starts = Max (starts_in_text, zero)
    block_range = Range (zero, block, one)
    query_rows = Add (block_starts, block_range)
    span_range = Range (zero, span, one)
    key_rows = Add (span_starts, span_range)

    query_column = Unsqueeze (query_rows, any_1d)
    key_row = Unsqueeze (key_rows, one_1d)
    offsets = Sub (key_row, query_column)
    is_right = LessOrEqual (offsets, right)
    least = Neg (left)
    is_left = GreaterOrEqual (offsets, least)
    near_rows = And (is_left, is_right)
    near = Unsqueeze (near_rows, one_1d)

    residue_range = Range (zero, step, one)
    residues = Unsqueeze (residue_range, one_1d)
    query_steps_2d = Mul (query_rows, step)
    query_steps = Unsqueeze (query_steps_2d, one_1d)
    query_tokens = Add (query_steps, residues)
    key_steps_2d = Mul (key_rows, step)
    key_steps = Unsqueeze (key_steps_2d, one_1d)
    key_tokens = Add (key_steps, residues)

    query_in_text = Min (query_tokens, last_token)
    key_in_text = Min (key_tokens, last_token)
    local_number = Constant <value = int32 {{1}}> ()
    local = Equal (token_kind, local_number)
    key_is_local = Gather <axis = 1> (local, key_in_text)
    key_exists = Less (key_tokens, tokens)
    key_visible = And (key_is_local, key_exists)
    before_last = Constant <value_ints = [-2]> ()
    visible = Unsqueeze (key_visible, before_last)
    seen = And (visible, near)
    nothing = Constant <value_float = 0.0> ()
    masked = Constant <value_float = -1.0e30> ()
    window_bias = Where (seen, nothing, masked)

    texts = Range (zero, batch, one)
    text_axes = Constant <value_ints = [1, 2, 3]> ()
    text_starts_1d = Mul (texts, tokens)
    text_starts = Unsqueeze (text_starts_1d, text_axes)
    all_queries = Add (query_in_text, text_starts)
    window_keys = Add (key_in_text, text_starts)
    {joined}
    block_1d = Unsqueeze (block, zero_1d)
    query_shape = Concat <axis = 0> (any_1d, block_1d)
    query_index = Reshape (all_queries, query_shape)
    columns_1d = Shape <start = 3, end = 4> (all_keys)
    key_shape = Concat <axis = 0> (any_1d, columns_1d)
    key_index = Reshape (all_keys, key_shape)
    bias_shape = Concat <axis = 0> (any_1d, one_1d, block_1d, columns_1d)
    bias = Reshape (all_bias, bias_shape)

    query_kinds = Gather <axis = 1> (token_kind, query_in_text)
    query_is_real = Cast <to = 9> (query_kinds)
    largest_bias = ReduceMax <keepdims = 0> (all_bias, any_1d)
    sees_any = Equal (largest_bias, nothing)
    is_answered = And (query_is_real, sees_any)
    answer_numbers = Cast <to = 1> (is_answered)
    answer_shape = Concat <axis = 0> (any_1d, block_1d, one_1d, one_1d)
    answers = Reshape (answer_numbers, answer_shape)
}}
"""

_NO_GLOBALS = """
    all_keys = Identity (window_keys)
    all_bias = Identity (window_bias)
"""

# TopK needs at least as many values as it returns, whatever the length of the text: hence the padding.
_JOINED_GLOBALS = """
    bound_1d = Constant <value_ints = [{bound}]> ()
    kind_padding = Constant <value_ints = [0, 0, 0, {bound}]> ()
    kind_numbers = Cast <to = 1> (token_kind)
    padded_kinds = Pad (kind_numbers, kind_padding)
    top_kinds, top_tokens = TopK <axis = 1> (padded_kinds, bound_1d)
    above_local = Constant <value_float = 1.5> ()
    is_global = Greater (top_kinds, above_local)
    global_tokens = Min (top_tokens, last_token)
    inner_axes = Constant <value_ints = [1, 2]> ()
    own_globals = Unsqueeze (global_tokens, inner_axes)
    global_rows = Add (own_globals, text_starts)
    outer_shape = Shape <start = 0, end = 3> (window_keys)
    global_shape = Concat <axis = 0> (outer_shape, bound_1d)
    global_keys = Expand (global_rows, global_shape)
    all_keys = Concat <axis = -1> (window_keys, global_keys)
    global_bias_2d = Where (is_global, nothing, masked)
    global_axes = Constant <value_ints = [1, 2, 3]> ()
    own_bias = Unsqueeze (global_bias_2d, global_axes)
    bias_outer_shape = Shape <start = 0, end = 4> (window_bias)
    global_bias_shape = Concat <axis = 0> (bias_outer_shape, bound_1d)
    global_bias = Expand (own_bias, global_bias_shape)
    all_bias = Concat <axis = -1> (window_bias, global_bias)
"""

_FUNCTION, _FUNCTION_OF_GROUPS = "WindowBlocks", "WindowBlocksOfGroups"

# Rows of the states of all texts are numbered through. block_sums are [batch * blocks * step, heads, block, head_dim].
_ATTEND = """
{name} <step, scale> (query, key, value, query_index, key_index, bias, answers, token_kind) => (attended) {{
    any_1d = Constant <value_ints = [-1]> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    head_shape = Shape <start = 2, end = 4> (query)
    row_shape = Concat <axis = 0> (any_1d, head_shape)
    key_head_shape = Shape <start = 2, end = 4> (key)
    key_row_shape = Concat <axis = 0> (any_1d, key_head_shape)
    query_rows = Reshape (query, row_shape)
    key_rows = Reshape (key, key_row_shape)
    value_rows = Reshape (value, key_row_shape)
    block_query = Gather <axis = 0> (query_rows, query_index)
    block_key = Gather <axis = 0> (key_rows, key_index)
    block_value = Gather <axis = 0> (value_rows, key_index)
    turned_query = Transpose <perm = [0, 2, 1, 3]> (block_query)
    turned_key = Transpose <perm = [0, 2, 1, 3]> (block_key)
    turned_value = Transpose <perm = [0, 2, 1, 3]> (block_value)
    {grouped}
    row_sums = Attention <scale: float = @scale> (rows_of_queries, turned_key, turned_value, bias)
    {ungrouped}
    all_rows = Transpose <perm = [0, 2, 1, 3]> (block_sums)
    {answered}
    step = Constant <value_int: int = @step> ()
    step_1d = Unsqueeze (step, zero_1d)
    block_1d = Shape <start = 1, end = 2> (query_index)
    residue_shape = Concat <axis = 0> (any_1d, step_1d, block_1d, head_shape)
    residue_rows = Reshape (block_rows, residue_shape)
    tokens_in_order = Transpose <perm = [0, 2, 1, 3, 4]> (residue_rows)
    batch_1d = Shape <start = 0, end = 1> (token_kind)
    text_shape = Concat <axis = 0> (batch_1d, any_1d, head_shape)
    rows_and_more = Reshape (tokens_in_order, text_shape)
    tokens_1d = Shape <start = 1, end = 2> (token_kind)
    attended = Slice (rows_and_more, zero_1d, tokens_1d, one_1d)
}}
"""

_ANSWERED = "block_rows = Mul (all_rows, answers)"
_ALL_ANSWERED = "block_rows = Identity (all_rows)"

_ALONE = {
    "grouped": "rows_of_queries = Identity (turned_query)",
    "ungrouped": "block_sums = Identity (row_sums)",
}

# The queries of heads that share keys are rows of one product, so that no key is copied for each head.
_GROUPED = {
    "grouped": """
    kv_heads = Shape <start = 2, end = 3> (key)
    dim = Shape <start = 3, end = 4> (query)
    grouped_shape = Concat <axis = 0> (zero_1d, kv_heads, any_1d, dim)
    rows_of_queries = Reshape (turned_query, grouped_shape)
""",
    "ungrouped": """
    heads = Shape <start = 2, end = 3> (query)
    ungrouped_shape = Concat <axis = 0> (zero_1d, heads, any_1d, dim)
    block_sums = Reshape (row_sums, ungrouped_shape)
""",
}
