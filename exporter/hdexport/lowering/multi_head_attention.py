"""ONNX Runtime's fused attention, ``com.microsoft::MultiHeadAttention``, in place of an operator's node.

Without a mask it is a flash attention, whose memory is linear in tokens; with most masks it is not. So a graph holds
branches, and chooses one by the mask of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import heads_of
from hdplugins.op_builder import OpBuilder, cond

if TYPE_CHECKING:
    import onnx_ir

CONTRIB_DOMAIN = "com.microsoft"

# ONNX Runtime adds this to masked scores; exp() of it is exactly 0 beside any real score. By default it adds -10000,
# and a row without a real key sees all keys (findings/onnxruntime_attention_of_masked_keys_alone.sh).
_MASKED_SCORE = -1.0e30


def fused_attention(
    op: OpBuilder,
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    *,
    key_mask: onnx_ir.Value | None = None,
    bias: onnx_ir.Value | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> onnx_ir.Value:
    """The output of the fused attention, [batch, tokens, hidden].

    Args:
        node: the operator's node, for its heads.
        states: query, key and value, [batch, tokens, hidden]. Keys and values of four axes would do as well, but then
            ONNX Runtime 1.31.1 holds all scores in memory: 950 MB more at 4096 tokens of 12 heads, and 1.4 of the time.
        key_mask: int32, [batch, tokens] with 0 for padding, or another mask that the operator takes; None if nothing is
            padding.
        bias: [1 or batch, heads, tokens, tokens], added to the scores.
        scale: factor of the scores; None for the node's scale.
        causal: whether a token sees only tokens up to itself. On a CPU, all scores are in memory then.
    """
    return op.MultiHeadAttention(
        *states,
        None,
        key_mask,
        bias,
        _domain=CONTRIB_DOMAIN,
        num_heads=heads_of(node.inputs[0]),
        scale=node.attributes["scale"].as_float() if scale is None else scale,
        mask_filter_value=_MASKED_SCORE,
        unidirectional=1 if causal else None,
    )


class KeyMask:
    """Values computed from a key mask, [batch, tokens], bool, once for all attentions of a graph.

    Attributes:
        unmasked: [], bool, whether every token is real.
        int32_mask: [batch, tokens], int32.
        any_key: [batch, 1, 1], float32, 1 for rows with a real token.
    """

    def __init__(self, op: OpBuilder, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        self.int32_mask = op.Cast(key_mask, to=ir.DataType.INT32)
        self.unmasked = op.Cast(op.ReduceMin(self.int32_mask, keepdims=0), to=ir.DataType.BOOL)
        largest = op.ReduceMax(self.int32_mask, [1], keepdims=1)  # [batch, 1]
        self.any_key = op.Cast(op.Unsqueeze(largest, [1]), to=ir.DataType.FLOAT)


def masked_attention(
    op: OpBuilder,
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    mask: KeyMask,
    *,
    bias: onnx_ir.Value | None = None,
    name: str,
) -> onnx_ir.Value:
    """The output of the fused attention, [batch, tokens, hidden], which gets no mask where no token is padding.

    `node` is the operator's node, with the heads and the scale; `bias` is [1, heads, tokens, tokens].
    """
    import onnx_ir as ir

    def unmasked(op: OpBuilder) -> onnx_ir.Value:
        return fused_attention(op, node, states, bias=bias)

    def masked(op: OpBuilder) -> onnx_ir.Value:
        attended = fused_attention(op, node, states, key_mask=mask.int32_mask, bias=bias)
        # A row without any real key is 0 by definition, and uniform without this.
        return op.Mul(attended, mask.any_key)

    return cond(op, mask.unmasked, unmasked, masked, name=name, dtype=ir.DataType.FLOAT)
