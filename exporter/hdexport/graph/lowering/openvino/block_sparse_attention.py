"""Block-sparse attention in OpenVINO: groups of blocks of queries against the keys that any of them sees, fused.

All groups of all texts are one batch of the standard's ``Attention``, which OpenVINO fuses with its mask; the rows of
global blocks are another. Texts that are attended to densely are one group that sees every key, if all are. Which
tokens a group and its keys are, and how often a key counts, is made once for all layers alike (`block_tables.py`); a
layer copies rows of its states by these tables.
"""

from __future__ import annotations

__all__ = ["lower_block_sparse_attention"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import (
    Insertion,
    merge_heads,
    replace_by_merged,
    states_tokens_first,
)
from hdexport.graph.lowering.openvino.block_tables import block_tables
from hdexport.graph.lowering.openvino.functions import DOMAIN, SharedTables, add_function
from hdexport.graph.passes.graph_nodes import attributes_of, operator_nodes
from hdplugins.attention.blocks.tables import Parts

if TYPE_CHECKING:
    import onnx_ir

_STATES = 3
"""Inputs before the mask, [batch, tokens], and the table of listed blocks."""


def lower_block_sparse_attention(model: onnx_ir.Model, *, padded: bool) -> bool:
    """Replace the nodes ``BlockSparseAttention`` of a float32 graph, in place.

    Args:
        model: the graph.
        padded: whether batches may have padding; the graph is the same.

    Returns:
        False: `padded` makes no difference.
    """
    import onnx_ir as ir

    tables = SharedTables(model)
    for node in operator_nodes(model, "BlockSparseAttention"):
        insertion = Insertion(node)
        attributes = attributes_of(node)
        token_mask, *listed = (value for value in node.inputs[_STATES:] if value is not None)
        parts = Parts.of(attributes, listed=bool(listed))
        states = states_tokens_first(insertion, node)
        assert node.inputs[0] is not None
        assert node.inputs[0].shape is not None
        text = block_tables(parts, attributes, heads=int(node.inputs[0].shape[1]))
        *table, sees_any = tables.of(insertion, text, [token_mask, *listed], outputs=7)
        name = "BlockGroups_global" if parts.global_rows else "BlockGroups"
        add_function(model, _ATTEND.format(name=name, join=_JOIN_GLOBAL_ROWS if parts.global_rows else _ONLY_GROUPS))
        inputs = [*states, *table]
        attended = insertion.insert(ir.node(name, inputs, attributes={"scale": attributes["scale"]}, domain=DOMAIN))
        if parts.window < 0:
            attended = insertion.op("Mul", [attended, sees_any])
        # The rows of padding are 0 by definition. All layers' products take less than 1 % of the time: no second graph.
        attended = insertion.op("Mul", [attended, tables.real(insertion, token_mask)])
        replace_by_merged(insertion, node, merge_heads(insertion, attended))
    return False


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
