"""Block-sparse attention on a CPU: blocks one after another, or all keys at once where every query sees every key."""

from __future__ import annotations

__all__ = ["lower_block_sparse_attention"]

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import (
    Insertion,
    choice,
    fused_attention,
    merge_heads,
    replace_by_merged,
    states_tokens_first,
)
from hdexport.graph.lowering.onnxruntime_cpu.sequential_bodies import sequential_node
from hdexport.graph.lowering.onnxruntime_cpu.short_texts import ShortTexts
from hdexport.graph.passes.graph_nodes import attributes_of, operator_nodes
from hdplugins.attention.blocks.tables import longest_dense

if TYPE_CHECKING:
    import onnx_ir


def lower_block_sparse_attention(model: onnx_ir.Model) -> None:
    """Give the nodes ``BlockSparseAttention`` of a float32 graph their sequential bodies, in place.

    They read states as projections leave them, with tokens before heads.
    """
    nodes = operator_nodes(model, "BlockSparseAttention")
    short_texts = ShortTexts()
    for number, node in enumerate(nodes):
        insertion = Insertion(node)
        attributes = attributes_of(node)
        states = states_tokens_first(insertion, node)
        sparse = sequential_node(model, node, states)
        longest = longest_dense(attributes, listed=len(node.inputs) > 4)
        if longest > 0:
            is_dense = short_texts.are_dense(insertion, node, longest)
            sparse = _choice(insertion, node, states, sparse, is_dense, name=f"blocks_{number}")
        replace_by_merged(insertion, node, merge_heads(insertion, insertion.insert(sparse)))


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
