"""Sliding-window attention on a CPU: blocks one after another, or all keys at once where a window covers the text.

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
"""

from __future__ import annotations

__all__ = ["lower_sliding_window_attention"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.onnxruntime_cpu.short_texts import ShortTexts
from hdexport.graph.passes.graph_nodes import attributes_of, body_of, operator_nodes
from hdplugins.attention.operator import BlockOrder

if TYPE_CHECKING:
    import onnx_ir


def lower_sliding_window_attention(model: onnx_ir.Model) -> None:
    """Give the nodes ``SlidingWindowAttention`` of a float32 graph their sequential bodies, in place."""
    import onnx_ir as ir

    nodes = operator_nodes(model, "SlidingWindowAttention")
    short_texts = ShortTexts()
    for number, node in enumerate(nodes):
        attributes = attributes_of(node)
        function = ir.serde.deserialize_function(body_of(node, BlockOrder.SEQUENTIAL))
        assert function.identifier() == node.op_identifier()
        model.functions[function.identifier()] = function
        # However short the text, a dilated head does not see all of it.
        if max(attributes["dilation"]) == 1:
            longest = min(attributes["left"], attributes["right"]) + 1
            short_texts.fuse(node, longest=longest, name=f"window_{number}")
