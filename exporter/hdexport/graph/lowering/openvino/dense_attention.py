"""Dense attention in OpenVINO: the standard's ``Attention``, with a mask only where there is padding.

Causal attention has one even without: OpenVINO 2026.4.1 makes a mask of all queries and keys of the standard's
``is_causal``, in each layer anew. Here all layers share it, 64 MB for a text of 4096 tokens.
"""

from __future__ import annotations

__all__ = ["lower_dense_attention"]

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import Insertion, repeat_key_heads
from hdexport.graph.passes.graph_nodes import is_causal, operator_nodes

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
    masks: dict[tuple[onnx_ir.Value, bool], _Mask] = {}
    for node in nodes:
        insertion, causal = Insertion(node), is_causal(node)
        # OpenVINO 2026.4.1 loads no groups but one of all heads.
        repeat_key_heads(insertion, node)
        query, key, value, key_mask = node.inputs
        assert key_mask is not None
        if (key_mask, causal) not in masks:
            masks[key_mask, causal] = _mask(insertion, key_mask, causal=causal, padded=padded)
        mask = masks[key_mask, causal]
        states = [query, key, value] if mask.bias is None else [query, key, value, mask.bias]
        attended = insertion.op("Attention", states, {"scale": node.attributes["scale"].as_float()})
        if mask.defined is not None:
            attended = insertion.op("Mul", [attended, mask.defined])
        attended.dtype, attended.shape = node.outputs[0].dtype, node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], attended)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    return bool(nodes)


@dataclass(frozen=True)
class _Mask:
    """What all attentions over the same keys share.

    Attributes:
        bias: scores to add, broadcast to [batch, 1, tokens, tokens]; None for none.
        defined: 1 for rows that are not 0 by definition, broadcast to [batch, 1, tokens, 1]; None where all are not.
            A row without a real key would be uniform.
    """

    bias: onnx_ir.Value | None
    defined: onnx_ir.Value | None


def _mask(insertion: Insertion, key_mask: onnx_ir.Value, *, causal: bool, padded: bool) -> _Mask:
    import onnx_ir as ir

    to_float, row_axes, column_axes = (
        {"to": int(ir.DataType.FLOAT)},
        insertion.integers([1, 2]),
        insertion.integers([1, 3]),
    )
    if not causal and not padded:
        return _Mask(None, None)
    row = insertion.op("Unsqueeze", [key_mask, row_axes])  # [batch, 1, 1, tokens]
    if not causal:
        real = insertion.op("Cast", [row], to_float)
        return _Mask(_bias(insertion, row), insertion.op("ReduceMax", [real, insertion.integers([3])], {"keepdims": 1}))
    earlier = _earlier_keys(insertion, key_mask)
    if not padded:
        return _Mask(_bias(insertion, earlier), None)
    real = insertion.op("Cast", [insertion.op("Unsqueeze", [key_mask, column_axes])], to_float)
    return _Mask(_bias(insertion, insertion.op("And", [earlier, row])), real)


def _earlier_keys(insertion: Insertion, key_mask: onnx_ir.Value) -> onnx_ir.Value:
    """[tokens, tokens], bool, for each query which keys are not behind it."""
    zero, one = (insertion.op("Constant", [], {"value_int": number}) for number in (0, 1))
    tokens = insertion.op("Squeeze", [insertion.op("Shape", [key_mask], {"start": 1, "end": 2})])
    places = insertion.op("Range", [zero, tokens, one])
    return insertion.op("LessOrEqual", [places, insertion.op("Unsqueeze", [places, insertion.integers([1])])])


def _bias(insertion: Insertion, seen: onnx_ir.Value) -> onnx_ir.Value:
    """0 where a key is seen, and a score that no weight comes of where it is not."""
    nothing, masked = (insertion.op("Constant", [], {"value_float": score}) for score in (0.0, _MASKED_SCORE))
    return insertion.op("Where", [seen, nothing, masked])
