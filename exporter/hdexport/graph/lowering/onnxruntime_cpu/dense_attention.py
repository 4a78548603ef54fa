"""Dense attention on a CPU: fused, and without a mask where no token is padding.

The runtime feeds padding only where it cannot be avoided. Causal attention needs no mask even there.

``com.microsoft::MultiHeadAttention`` is a flash attention unless it is causal, ``com.microsoft::GroupQueryAttention``
only if it is. Milliseconds of one layer and one text, and megabytes of growth, in ONNX Runtime 1.31.1 on two cores of
an AMD EPYC:

====================  ============================  ===========  ===========
heads                 attention                     2048 tokens  4096 tokens
====================  ============================  ===========  ===========
12 of 64              MultiHeadAttention                         314 (210)
12 of 64              the same, causal              240 (349)
12 of 64              GroupQueryAttention                        777 (1082)
12 of 64              the same, causal                           237 (259)
16 of 128, 8 of keys  GroupQueryAttention           374 (499)
16 of 128, 8 of keys  the same, causal              156 (221)    523 (229)
====================  ============================  ===========  ===========
"""

from __future__ import annotations

__all__ = ["lower_dense_attention"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import (
    Insertion,
    merge_heads,
    repeat_key_heads,
    replace_by_merged,
    states_tokens_first,
)
from hdexport.graph.lowering.onnxruntime_cpu.causal_attention import CausalMask, causal_choice
from hdexport.graph.lowering.onnxruntime_cpu.key_masks import KeyMask, masked_choice
from hdexport.graph.passes.graph_nodes import is_causal, operator_nodes

if TYPE_CHECKING:
    import onnx_ir


def lower_dense_attention(model: onnx_ir.Model) -> None:
    """Replace the nodes ``DenseAttention`` of a float32 graph, in place."""
    nodes = operator_nodes(model, "DenseAttention")
    masks: dict[onnx_ir.Value, KeyMask] = {}
    causal_masks: dict[onnx_ir.Value, CausalMask] = {}
    for number, node in enumerate(nodes):
        key_mask = node.inputs[3]
        assert key_mask is not None
        insertion, name = Insertion(node), f"attention_{number}"
        if is_causal(node):
            if key_mask not in causal_masks:
                causal_masks[key_mask] = CausalMask(insertion, key_mask)
            attended = causal_choice(insertion, node, causal_masks[key_mask], name=name)
        else:
            if key_mask not in masks:
                masks[key_mask] = KeyMask(insertion, key_mask)
            repeat_key_heads(insertion, node)
            states = [merge_heads(insertion, state) for state in states_tokens_first(insertion, node)]
            attended = masked_choice(node, states, masks[key_mask], name=name)
        replace_by_merged(insertion, node, insertion.insert(attended))
