"""Dense attention on a CPU: fused, and without a mask where no token is padding.

The runtime feeds padding only where it cannot be avoided.
"""

from __future__ import annotations

__all__ = ["lower_dense_attention"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import (
    Insertion,
    choice,
    fused_attention,
    replace_by_merged,
    states_before_splitting,
)
from hdexport.graph.passes.graph_nodes import operator_nodes

if TYPE_CHECKING:
    import onnx_ir


def lower_dense_attention(model: onnx_ir.Model) -> None:
    """Replace the nodes ``DenseAttention`` of a float32 graph, in place."""
    nodes = operator_nodes(model, "DenseAttention")
    masks: dict[onnx_ir.Value, _Mask] = {}
    for number, node in enumerate(nodes):
        key_mask = node.inputs[3]
        assert key_mask is not None
        insertion = Insertion(node)
        if key_mask not in masks:
            masks[key_mask] = _Mask(insertion, key_mask)
        _lower(insertion, node, masks[key_mask], name=f"attention_{number}")


class _Mask:
    """What every attention of a graph needs of one key mask, computed once.

    Attributes:
        unmasked: [], bool, whether every token is real.
        numbers: [batch, tokens], int32.
        any_key: [batch, 1, 1], float32, 1 for rows with a real token.
    """

    def __init__(self, insertion: Insertion, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        self.numbers = insertion.op("Cast", [key_mask], {"to": int(ir.DataType.INT32)})
        smallest = insertion.op("ReduceMin", [self.numbers], {"keepdims": 0})
        self.unmasked = insertion.op("Cast", [smallest], {"to": int(ir.DataType.BOOL)})
        axes = insertion.integers([1])
        largest = insertion.op("ReduceMax", [self.numbers, axes], {"keepdims": 1})  # [batch, 1]
        column = insertion.op("Unsqueeze", [largest, axes])  # [batch, 1, 1]
        self.any_key = insertion.op("Cast", [column], {"to": int(ir.DataType.FLOAT)})


def _lower(insertion: Insertion, node: onnx_ir.Node, mask: _Mask, *, name: str) -> None:
    import onnx_ir as ir

    states = states_before_splitting(insertion, node)
    bias = node.inputs[4] if len(node.inputs) > 4 else None
    free = fused_attention(node, states, bias=bias)
    masked = fused_attention(node, states, key_mask=mask.numbers, bias=bias)
    # A row without any real key is 0 by definition, and uniform without this.
    zeroed = ir.node("Mul", [masked.outputs[0], mask.any_key])
    attended = choice(mask.unmasked, then=[free], otherwise=[masked, zeroed], name=name, dtype=ir.DataType.FLOAT)
    replace_by_merged(insertion, node, insertion.insert(attended))
