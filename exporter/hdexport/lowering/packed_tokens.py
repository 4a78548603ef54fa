"""Texts whose real tokens were moved before their padding: causal attention then needs no mask.

A token sees none behind itself, so padding at the end is seen by padding alone. Moving rows of states takes little
beside the attention, and the fused attentions are at their best without a mask: those of some runtimes hold all
scores with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import Insertion

if TYPE_CHECKING:
    import onnx_ir


class PackedTokens:
    """Where the tokens of a mask, [batch, tokens], bool, go; every attention of a graph with that mask shares it.

    Attributes:
        unmasked: [], bool, whether every token is real.
        lengths: [batch], int64, real tokens of each text.
        real: [batch, tokens, 1], bool.
    """

    def __init__(self, insertion: Insertion, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        op, last, columns = insertion.op, insertion.integers([-1]), insertion.integers([1])
        zero, one = (op("Constant", [], {"value_int": number}) for number in (0, 1))
        numbers = op("Cast", [key_mask], {"to": int(ir.DataType.INT64)})
        self.unmasked = op("Cast", [op("ReduceMin", [numbers], {"keepdims": 0})], {"to": int(ir.DataType.BOOL)})
        self.lengths = op("ReduceSum", [numbers, columns], {"keepdims": 0})
        self.real = op("Unsqueeze", [key_mask, last])

        tokens = op("Squeeze", [op("Shape", [key_mask], {"start": 1, "end": 2})])
        positions = op("Range", [zero, tokens, one])
        before = op("Sub", [op("CumSum", [numbers, one]), numbers])  # [batch, tokens], real tokens before each
        padding_before = op("Sub", [positions, before])
        behind = op("Add", [op("Unsqueeze", [self.lengths, columns]), padding_before])
        places = op("Where", [key_mask, before, behind])
        everywhere = op("Add", [op("Mul", [numbers, zero]), positions])
        order = op("ScatterElements", [everywhere, places, everywhere], {"axis": 1})
        self._places, self._order = (op("Unsqueeze", [indices, last]) for indices in (places, order))

    def around(
        self,
        states: Sequence[onnx_ir.Value],
        attend: Callable[[Sequence[onnx_ir.Value]], onnx_ir.Node],
        zero: onnx_ir.Value,
    ) -> list[onnx_ir.Node]:
        """Nodes, in no graph yet, by which a node of attention, which `attend` makes, sees packed texts; the last gives
        [batch, tokens, hidden], 0 at padding.
        """
        packs = self.pack(states)
        attended = attend([pack.outputs[0] for pack in packs])
        return [*packs, attended, *self.unpack(attended.outputs[0], zero)]

    def pack(self, states: Sequence[onnx_ir.Value]) -> list[onnx_ir.Node]:
        """Nodes, in no graph yet, that give states, [batch, tokens, ...], in the order of packed texts."""
        return [self._gather(state, self._order) for state in states]

    def unpack(self, attended: onnx_ir.Value, zero: onnx_ir.Value) -> list[onnx_ir.Node]:
        """Nodes, in no graph yet, that bring packed states, [batch, tokens, hidden], back to their tokens; padding is
        0.
        """
        import onnx_ir as ir

        back = self._gather(attended, self._places)
        return [back, ir.node("Where", [self.real, back.outputs[0], zero])]

    @staticmethod
    def _gather(states: onnx_ir.Value, indices: onnx_ir.Value) -> onnx_ir.Node:
        import onnx_ir as ir

        return ir.node("GatherND", [states, indices], {"batch_dims": 1})
