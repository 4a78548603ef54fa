"""Block-sparse attention: a sequential body on a CPU, groups of blocks in OpenVINO.

In ONNX Runtime on a CPU, the blocks are computed one after another, or all keys at once where every query sees every
key.

In OpenVINO, groups of blocks of queries attend to the keys that any of the blocks sees. All groups of all texts are one
batch of the standard's ``Attention``, which OpenVINO fuses with its mask; the rows of global blocks are another batch.
Texts that are attended to densely are one group that sees every key, if all texts are. The tokens of a group, the keys
of a group, and the times that a key counts are made once for all layers alike (`openvino_tables.py`); a layer copies
rows of its states by these tables.
"""

from __future__ import annotations

__all__ = ["LOWERING"]

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hdexport.lowering.lowering import Lowering, SharedParts
from hdexport.lowering.multi_head_attention import (
    Insertion,
    choice,
    fused_attention,
    merge_heads,
    replace_by_merged,
    states_tokens_first,
)
from hdexport.lowering.nodes import attributes_of
from hdexport.lowering.openvino_functions import DOMAIN, SharedTables, add_function
from hdexport.lowering.sequential_bodies import sequential_node
from hdexport.lowering.short_texts import ShortTexts
from hdruntime.constants import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir

_STATES = 3
"""Inputs before the mask, [batch, tokens], and the table of listed blocks."""


class _BlocksLowering(Lowering):
    """Sequential bodies, or all keys at once where every query sees every key; groups of blocks in OpenVINO."""

    operator = "BlockSparseAttention"
    fused: ClassVar = {OPENVINO_LOWERING: ("float32",)}
    fuses_short_texts = True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        from hdplugins.attention.blocks.tables import longest_dense

        insertion = Insertion(node)
        states = states_tokens_first(insertion, node)
        sparse = sequential_node(parts.model, node, states)
        longest, name = (
            longest_dense(attributes_of(node), listed=len(node.inputs) > _STATES + 1),
            parts.new_name("blocks"),
        )
        if longest > 0:
            is_dense = parts.once(ShortTexts, ShortTexts).are_dense(insertion, node, longest)
            sparse = _choice(insertion, node, states, sparse, is_dense, name=name)
        replace_by_merged(insertion, node, merge_heads(insertion, insertion.insert(sparse)))

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        import onnx_ir as ir

        from hdexport.attention.blocks.openvino_tables import block_tables
        from hdplugins.attention.blocks.tables import Parts

        tables = parts.once(SharedTables, lambda: SharedTables(parts.model))
        insertion = Insertion(node)
        attributes = attributes_of(node)
        token_mask, *listed = (value for value in node.inputs[_STATES:] if value is not None)
        seen = Parts.of(attributes, listed=bool(listed))
        states = states_tokens_first(insertion, node)
        assert node.inputs[0] is not None
        assert node.inputs[0].shape is not None
        text = block_tables(seen, attributes, heads=int(node.inputs[0].shape[1]))
        *table, sees_any = tables.of(insertion, text, [token_mask, *listed], outputs=7)
        name = "BlockGroups_global" if seen.global_rows else "BlockGroups"
        join = _JOIN_GLOBAL_ROWS if seen.global_rows else _ONLY_GROUPS
        add_function(parts.model, _ATTEND.format(name=name, join=join))
        inputs = [*states, *table]
        attended = insertion.insert(ir.node(name, inputs, attributes={"scale": attributes["scale"]}, domain=DOMAIN))
        if seen.window < 0:
            attended = insertion.op("Mul", [attended, sees_any])
        # The rows of padding are 0 by definition. All layers' products take less than 1 % of the time: no second graph.
        attended = insertion.op("Mul", [attended, tables.real(insertion, token_mask)])
        replace_by_merged(insertion, node, merge_heads(insertion, attended))
        return False


LOWERING = _BlocksLowering()


def _choice(
    insertion: Insertion,
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    sparse: onnx_ir.Node,
    is_dense: onnx_ir.Value,
    *,
    name: str,
) -> onnx_ir.Node:
    """A node that gives [batch, tokens, heads, head_dim], by the fused attention where every query sees every key."""
    import onnx_ir as ir

    assert node.inputs[0] is not None
    assert node.inputs[0].shape is not None
    fused = fused_attention(node, [merge_heads(insertion, state) for state in states])
    # A branch that ends with a Reshape copies what it returns: here the one of short texts.
    to_heads = insertion.integers([0, 0, int(node.inputs[0].shape[1]), -1])
    split = ir.node("Reshape", [fused.outputs[0], to_heads])
    return choice(is_dense, then=[fused, split], otherwise=[sparse], name=name, dtype=ir.DataType.FLOAT)


# Rows of the states, [head_dim], are numbered through: (text * tokens + token) * heads + head. Where there are no
# global rows, the tables of them are not used.
_ATTEND = """
{name} <scale> (
    query, key, value, query_index, key_index, bias, global_index, global_bias, place_index
) => (attended) {{
    any_1d = Constant <value_ints = [-1]> ()
    dim_1d = Shape <start = 3, end = 4> (query)
    row_shape = Concat <axis = 0> (any_1d, dim_1d)
    query_rows = Reshape (query, row_shape)
    key_rows = Reshape (key, row_shape)
    value_rows = Reshape (value, row_shape)
    group_query = Gather <axis = 0> (query_rows, query_index)
    group_key = Gather <axis = 0> (key_rows, key_index)
    group_value = Gather <axis = 0> (value_rows, key_index)
    group_sums = Attention <scale: float = @scale> (group_query, group_key, group_value, bias)
    group_rows = Reshape (group_sums, row_shape)
    {join}
    attended = Gather <axis = 0> (rows, place_index)
}}
"""

_ONLY_GROUPS = """
    rows = Identity (group_rows)
"""

_JOIN_GLOBAL_ROWS = """
    turned_key = Transpose <perm = [0, 2, 1, 3]> (key)
    turned_value = Transpose <perm = [0, 2, 1, 3]> (value)
    global_query = Gather <axis = 0> (query_rows, global_index)
    global_sums = Attention <scale: float = @scale> (global_query, turned_key, turned_value, global_bias)
    global_rows = Reshape (global_sums, row_shape)
    rows = Concat <axis = 0> (group_rows, global_rows)
"""
