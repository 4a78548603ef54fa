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
from hdexport.graph.passes.graph_nodes import attributes_of, group_of, operator_nodes

if TYPE_CHECKING:
    import onnx_ir


def lower_sliding_window_attention(model: onnx_ir.Model) -> None:
    """Give the nodes ``SlidingWindowAttention`` of a float32 graph their sequential bodies, in place."""
    nodes = operator_nodes(model, "SlidingWindowAttention")
    short_texts = ShortTexts()
    for number, node in enumerate(nodes):
        attributes = attributes_of(node)
        _set_body(model, node)
        # However short the text, a dilated head does not see all of it.
        if max(attributes["dilation"]) == 1:
            longest = min(attributes["left"], attributes["right"]) + 1
            short_texts.fuse(node, longest=longest, name=f"window_{number}")


def _set_body(model: onnx_ir.Model, node: onnx_ir.Node) -> None:
    import onnx_ir as ir

    from hdplugins.operators.operator import BlockOrder
    from hdplugins.operators.sliding_window_attention.graph import function_of_node

    body = function_of_node(
        inputs=len(node.inputs),
        attributes=attributes_of(node),
        grouped=group_of(node) > 1,
        order=BlockOrder.SEQUENTIAL,
    )
    function = ir.serde.deserialize_function(body)
    assert function.identifier() == node.op_identifier()
    model.functions[function.identifier()] = function
