"""Dense attention on a CPU: fused, and without a mask where no token is padding.

The runtime feeds padding only where it cannot be avoided.
"""

from __future__ import annotations

__all__ = ["lower_dense_attention"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import Insertion, replace_by_merged, states_before_splitting
from hdexport.graph.lowering.onnxruntime_cpu.key_masks import KeyMask, masked_choice
from hdexport.graph.passes.graph_nodes import operator_nodes

if TYPE_CHECKING:
    import onnx_ir


def lower_dense_attention(model: onnx_ir.Model) -> None:
    """Replace the nodes ``DenseAttention`` of a float32 graph, in place."""
    nodes = operator_nodes(model, "DenseAttention")
    masks: dict[onnx_ir.Value, KeyMask] = {}
    for number, node in enumerate(nodes):
        key_mask = node.inputs[3]
        assert key_mask is not None
        insertion = Insertion(node)
        if key_mask not in masks:
            masks[key_mask] = KeyMask(insertion, key_mask)
        states = states_before_splitting(insertion, node)
        attended = masked_choice(node, states, masks[key_mask], name=f"attention_{number}")
        replace_by_merged(insertion, node, insertion.insert(attended))
