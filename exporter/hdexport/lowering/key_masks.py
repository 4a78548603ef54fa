"""What the fused attentions of a graph ask about its key masks, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import Insertion, choice, fused_attention

if TYPE_CHECKING:
    import onnx_ir


class KeyMask:
    """The parts of one key mask that every attention of a graph needs, computed once.

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


def masked_choice(
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    mask: KeyMask,
    *,
    bias: onnx_ir.Value | None = None,
    name: str,
) -> onnx_ir.Node:
    """A node that gives [batch, tokens, hidden], by the fused attention without a mask where no token is padding.

    Args:
        node: of the operator whose place it takes, for its heads and scale.
        states: as the fused attention takes them.
        mask: of the keys.
        bias: [1, heads, tokens, tokens]; None for none.
        name: of the choice.
    """
    import onnx_ir as ir

    free = fused_attention(node, states, bias=bias)
    masked = fused_attention(node, states, key_mask=mask.numbers, bias=bias)
    # A row without any real key is 0 by definition, and uniform without this.
    zeroed = ir.node("Mul", [masked.outputs[0], mask.any_key])
    return choice(mask.unmasked, then=[free], otherwise=[masked, zeroed], name=name, dtype=ir.DataType.FLOAT)
