"""Pack sequences: move real tokens before padding, so that causal attention needs no mask.

A token does not see tokens after it, so only padding sees padding at the end. Moving the rows of states takes little
time beside the attention. Fused attentions are fastest without a mask: with a mask, those of some runtimes hold all
scores in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdplugins.op_builder import OpBuilder

if TYPE_CHECKING:
    import onnx_ir


class PackedTokens:
    """Where the tokens of a mask, [batch, tokens], bool, go; all attentions of a graph with that mask share it.

    Attributes:
        unmasked: [], bool, whether every token is real.
        lengths: [batch], int64, number of real tokens of each sequence.
        real: [batch, tokens, 1], bool.
    """

    def __init__(self, op: OpBuilder, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        is_real = op.Cast(key_mask, to=ir.DataType.INT64)
        self.unmasked = op.Cast(op.ReduceMin(is_real, keepdims=0), to=ir.DataType.BOOL)
        self.lengths = op.ReduceSum(is_real, [1], keepdims=0)
        self.real = op.Unsqueeze(key_mask, [-1])

        tokens = op.Squeeze(op.Shape(key_mask, start=1, end=2))
        positions = op.Range(0, tokens, 1)
        real_before = op.Sub(op.CumSum(is_real, 1), is_real)  # [batch, tokens], real tokens before each token
        padding_before = op.Sub(positions, real_before)
        padding_index = op.Add(op.Unsqueeze(self.lengths, [1]), padding_before)
        packed_index = op.Where(key_mask, real_before, padding_index)
        all_positions = op.Add(op.Mul(is_real, 0), positions)
        order = op.ScatterElements(all_positions, packed_index, all_positions, axis=1)
        self._packed_index, self._order = (op.Unsqueeze(index, [-1]) for index in (packed_index, order))

    def pack(self, op: OpBuilder, states: Sequence[onnx_ir.Value]) -> list[onnx_ir.Value]:
        """States, [batch, tokens, ...], in the order of packed sequences."""
        return [op.GatherND(state, self._order, batch_dims=1) for state in states]

    def unpack(self, op: OpBuilder, attended: onnx_ir.Value, zero: onnx_ir.Value | float) -> onnx_ir.Value:
        """Packed states, [batch, tokens, hidden], in the order of the tokens; `zero` at padding."""
        return op.Where(self.real, op.GatherND(attended, self._packed_index, batch_dims=1), zero)
