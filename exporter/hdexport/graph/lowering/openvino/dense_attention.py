"""Dense attention in OpenVINO: the standard's ``Attention``, with a mask only where there is padding."""

from __future__ import annotations

__all__ = ["lower_dense_attention"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import Insertion
from hdexport.graph.passes.graph_nodes import operator_nodes

if TYPE_CHECKING:
    import onnx_ir

_MASKED_SCORE = -1.0e30
"""Added to masked scores; exp() of it is exactly 0 beside any real score."""


def lower_dense_attention(model: onnx_ir.Model, *, padded: bool) -> bool:
    """Replace the nodes ``DenseAttention`` of a float32 graph, in place.

    Args:
        model: the graph.
        padded: whether batches may have padding.

    Returns:
        whether there was one.
    """
    import onnx_ir as ir

    nodes = operator_nodes(model, "DenseAttention")
    masks: dict[onnx_ir.Value, tuple[onnx_ir.Value, onnx_ir.Value]] = {}
    for node in nodes:
        query, key, value, key_mask = node.inputs
        assert key_mask is not None
        insertion = Insertion(node)
        scale = {"scale": node.attributes["scale"].as_float()}
        if padded:
            if key_mask not in masks:
                masks[key_mask] = _mask(insertion, key_mask)
            bias, any_key = masks[key_mask]
            masked = insertion.op("Attention", [query, key, value, bias], scale)
            # A row without any real key is 0 by definition, and uniform without this.
            attended = insertion.op("Mul", [masked, any_key])
        else:
            attended = insertion.op("Attention", [query, key, value], scale)
        attended.dtype, attended.shape = node.outputs[0].dtype, node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], attended)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    return bool(nodes)


def _mask(insertion: Insertion, key_mask: onnx_ir.Value) -> tuple[onnx_ir.Value, onnx_ir.Value]:
    """Scores to add, [batch, 1, 1, tokens], and 1 for rows with a real token, [batch, 1, 1, 1]."""
    import onnx_ir as ir

    real = insertion.op("Cast", [key_mask], {"to": int(ir.DataType.FLOAT)})
    column = insertion.op("Unsqueeze", [real, insertion.integers([1, 2])])
    one = insertion.op("Constant", [], {"value_float": 1.0})
    bias = insertion.op("Mul", [insertion.op("Sub", [one, column]), _constant(insertion, _MASKED_SCORE)])
    any_key = insertion.op("ReduceMax", [column, insertion.integers([3])], {"keepdims": 1})
    return bias, any_key


def _constant(insertion: Insertion, value: float) -> onnx_ir.Value:
    return insertion.op("Constant", [], {"value_float": value})
