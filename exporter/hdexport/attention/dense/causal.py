"""Causal dense attention on a CPU: ONNX Runtime's ``com.microsoft::GroupQueryAttention``, without a cache.

It is a flash attention if it is causal and its outputs for a cache are asked for, and repeats no head of keys. Texts
with padding are packed; it takes their lengths. Heads of a size that it refuses have ``MultiHeadAttention``, causal and
with all scores in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import (
    CONTRIB_DOMAIN,
    Insertion,
    choice,
    fused_attention,
    merge_heads,
    repeat_key_heads,
    states_tokens_first,
)
from hdexport.lowering.packed_tokens import PackedTokens

if TYPE_CHECKING:
    import onnx_ir

_HEAD_DIM_MULTIPLE = 8
"""Sizes of a head that it takes."""

_OUTPUTS = 3
"""What it attended to, and keys and values for a cache, which the flash attention reads."""


class CausalMask:
    """The parts of one key mask that every causal attention of a graph needs, computed once.

    Attributes:
        packed: the texts without padding between and before their tokens.
        last_tokens: [batch], int32, real tokens of each text but one, and no less than 0.
        tokens: [], int32, of all texts.
        zero: [], float32.
    """

    def __init__(self, insertion: Insertion, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        to_int32 = {"to": int(ir.DataType.INT32)}
        self.packed = PackedTokens(insertion, key_mask)
        one = insertion.op("Constant", [], {"value_int": 1})
        last = insertion.op("Sub", [insertion.op("Max", [self.packed.lengths, one]), one])
        self.last_tokens = insertion.op("Cast", [last], to_int32)
        tokens = insertion.op("Squeeze", [insertion.op("Shape", [key_mask], {"start": 1, "end": 2})])
        self.tokens = insertion.op("Cast", [tokens], to_int32)
        self.zero = insertion.op("Constant", [], {"value_float": 0.0})


def causal_choice(insertion: Insertion, node: onnx_ir.Node, mask: CausalMask, *, name: str) -> onnx_ir.Node:
    """A node that gives [batch, tokens, hidden], and packs no texts where no token is padding.

    Args:
        insertion: before the node.
        node: of causal attention, whose place it takes.
        mask: of the keys.
        name: of the choice.
    """
    import onnx_ir as ir

    if not _takes_heads_of(node):
        repeat_key_heads(insertion, node)
    states = [merge_heads(insertion, state) for state in states_tokens_first(insertion, node)]
    free = _attention(node, states, mask)
    packs = mask.packed.pack(states)
    packed = _attention(node, [pack.outputs[0] for pack in packs], mask)
    unpacks = mask.packed.unpack(packed.outputs[0], mask.zero)
    return choice(
        mask.packed.unmasked,
        then=[free],
        otherwise=[*packs, packed, *unpacks],
        name=name,
        dtype=ir.DataType.FLOAT,
    )


def _takes_heads_of(node: onnx_ir.Node) -> bool:
    assert node.inputs[0] is not None
    assert node.inputs[0].shape is not None
    return int(node.inputs[0].shape[3]) % _HEAD_DIM_MULTIPLE == 0


def _attention(node: onnx_ir.Node, states: Sequence[onnx_ir.Value], mask: CausalMask) -> onnx_ir.Node:
    import onnx_ir as ir

    if not _takes_heads_of(node):
        return fused_attention(node, states, causal=True)
    heads, kv_heads = (
        int(state.shape[1]) for state in node.inputs[:2] if state is not None and state.shape is not None
    )
    return ir.node(
        "GroupQueryAttention",
        [*states, None, None, mask.last_tokens, mask.tokens],
        {"num_heads": heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()},
        domain=CONTRIB_DOMAIN,
        num_outputs=_OUTPUTS,
    )
