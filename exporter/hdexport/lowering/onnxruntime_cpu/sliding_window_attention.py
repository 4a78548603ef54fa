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

Longer texts are not for it: its time is quadratic, and with the mask that the window would then be, so is its memory.
"""

from __future__ import annotations

__all__ = ["lower_sliding_window_attention"]

from typing import TYPE_CHECKING

from hdexport.lowering.onnxruntime_cpu.flash import (
    SWAP_HEADS_AND_TOKENS,
    Insertion,
    choose,
    fused_attention,
    replace_by_merged,
)
from hdexport.passes.graph_nodes import attributes_of, operator_nodes

if TYPE_CHECKING:
    import onnx_ir


def lower_sliding_window_attention(model: onnx_ir.Model) -> int:
    """Give the nodes ``SlidingWindowAttention`` of a float32 graph their sequential bodies, in place.

    Returns:
        The number of nodes.
    """
    nodes = operator_nodes(model, "SlidingWindowAttention")
    conditions: dict[tuple[onnx_ir.Value, int], onnx_ir.Value] = {}
    for number, node in enumerate(nodes):
        attributes = attributes_of(node)
        _set_body(model, node)
        if max(attributes["dilation"]) > 1:
            # However short the text, such a head does not see all of it.
            continue
        token_kind = node.inputs[3]
        assert token_kind is not None
        longest = min(attributes["left"], attributes["right"]) + 1
        insertion = Insertion(node)
        if (token_kind, longest) not in conditions:
            conditions[token_kind, longest] = _is_covered(insertion, token_kind, longest)
        _choose(insertion, node, conditions[token_kind, longest], name=f"window_{number}")
    return len(nodes)


def _set_body(model: onnx_ir.Model, node: onnx_ir.Node) -> None:
    import onnx_ir as ir

    from hdplugins.sliding_window_attention.onnx_function import BlockOrder, function_for

    attributes = attributes_of(node)
    body = function_for(
        dilation=attributes["dilation"], global_bound=attributes["global_bound"], order=BlockOrder.SEQUENTIAL
    )
    function = ir.serde.deserialize_function(body)
    assert function.identifier() == node.op_identifier()
    model.functions[function.identifier()] = function


def _is_covered(insertion: Insertion, token_kind: onnx_ir.Value, longest: int) -> onnx_ir.Value:
    """[], bool: whether no token is padding and every query's window reaches both ends of the text."""
    import onnx_ir as ir

    smallest = insertion.op("ReduceMin", [token_kind], {"keepdims": 0})
    unpadded = insertion.op("Cast", [smallest], {"to": int(ir.DataType.BOOL)})
    tokens = insertion.op("Squeeze", [insertion.op("Shape", [token_kind], {"start": 1, "end": 2})])
    reached = insertion.op("LessOrEqual", [tokens, insertion.op("Constant", [], {"value_int": longest})])
    return insertion.op("And", [unpadded, reached])


def _choose(insertion: Insertion, node: onnx_ir.Node, is_covered: onnx_ir.Value, *, name: str) -> None:
    """Both branches read split heads: states from before the splitting would be kept in memory for the other one."""
    import onnx_ir as ir

    query, key, value = (state for state in node.inputs[:3] if state is not None)
    to_hidden = insertion.integers([0, 0, -1])

    def merge(heads: onnx_ir.Value) -> list[onnx_ir.Node]:
        tokens_first = ir.node("Transpose", [heads], {"perm": SWAP_HEADS_AND_TOKENS})
        return [tokens_first, ir.node("Reshape", [tokens_first.outputs[0], to_hidden])]

    merged_query = merge(query)
    fused = fused_attention(node, [merged_query[-1].outputs[0], key, value])
    blocks = ir.node(node.op_type, node.inputs, attributes=node.attributes, domain=node.domain)
    attended = choose(
        insertion,
        is_covered,
        then=[*merged_query, fused],
        otherwise=[blocks, *merge(blocks.outputs[0])],
        name=name,
    )
    replace_by_merged(insertion, node, attended)
