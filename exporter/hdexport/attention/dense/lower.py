"""Dense attention: fused by every backend, and without a mask where no token is padding.

The runtime feeds padding only where it cannot be avoided. Causal attention needs no mask even there.

``com.microsoft::MultiHeadAttention`` is a flash attention unless it is causal, ``com.microsoft::GroupQueryAttention``
only if it is (findings/onnxruntime_grouped_attention_is_flash_if_causal.sh). Milliseconds of one layer and one text,
and megabytes of growth, in ONNX Runtime 1.31.1 on two cores of an AMD EPYC:

====================  ============================  ===========  ===========
heads                 attention                     2048 tokens  4096 tokens
====================  ============================  ===========  ===========
12 of 64              MultiHeadAttention                         314 (210)
12 of 64              the same, causal              240 (349)
12 of 64              GroupQueryAttention                        777 (1082)
12 of 64              the same, causal                           237 (259)
16 of 128, 8 of keys  GroupQueryAttention           374 (499)
16 of 128, 8 of keys  the same, causal              156 (221)    523 (229)
====================  ============================  ===========  ===========

In OpenVINO, dense attention is the standard's ``Attention``, but where it is causal, parts of its operators, which
OpenVINO fuses: of the standard's ``is_causal`` OpenVINO 2026.4.1 makes a mask of all queries and keys
(`openvino_causal.py`). Two layers of Qwen3-Embedding-0.6B's shape, one text, bfloat16, seconds of CPU time, and
gigabytes of growth, on two shared cores of an AMD EPYC, 2026-11-29:

====================  ===========  ===========  ============
attention             512 tokens   2048 tokens  16384 tokens
====================  ===========  ===========  ============
a mask of all         0.097        0.60         40 (2.1)
four parts            0.093        0.46         22 (1.1)
eight parts                                     20 (1.3)
a loop over blocks                              22 (2.7)
====================  ===========  ===========  ============
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hdexport.lowering.lowering import ENGINES, Lowering, SharedParts
from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN, KeyMask, fused_attention, masked_attention
from hdexport.lowering.nodes import (
    heads_of,
    is_causal,
    merged_states,
    repeat_key_heads,
    replace_by_merged,
    replace_result,
    shape_of,
    states_of,
    token_mask_of,
)
from hdexport.lowering.openvino_functions import OpenVinoLowering
from hdexport.lowering.packed_tokens import PackedTokens
from hdplugins.attention.function_parts import MASKED, transpose_heads_and_tokens, upcast
from hdplugins.op_builder import OpBuilder, cond
from hdruntime.backends.onnxruntime import CPU_LOWERING, CUDA_LOWERING
from hdruntime.backends.openvino import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir


class _DenseLowering(Lowering, OpenVinoLowering):
    """A fused kernel of each backend; ONNX Runtime and OpenVINO upcast half precision on a CPU."""

    operator = "DenseAttention"
    fused: ClassVar = {
        CPU_LOWERING: ("float32",),
        CUDA_LOWERING: ("float32", "float16", "bfloat16"),
        OPENVINO_LOWERING: ("float32",),
        ENGINES: ("float16", "bfloat16"),
    }

    def is_dense(self, node: onnx_ir.Node) -> bool:
        return True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        op, key_mask, name = OpBuilder.before(node), token_mask_of(node), parts.new_name("attention")
        if is_causal(node):
            causal_mask = parts.once((CausalMask, key_mask), lambda: CausalMask(op, key_mask))
            attended = causal_attention(op, node, causal_mask, name=name)
        else:
            mask = parts.once((KeyMask, key_mask), lambda: KeyMask(op, key_mask))
            repeat_key_heads(op, node)
            attended = masked_attention(op, node, merged_states(op, node), mask, name=name)
        replace_by_merged(op, node, attended)

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        op, key_mask = OpBuilder.before(node), token_mask_of(node)
        # OpenVINO 2026.4.1 runs no groups where a graph leaves the number of heads open
        # (findings/openvino_runs_no_grouped_attention_of_unknown_heads.sh).
        repeat_key_heads(op, node)
        scale = node.attributes["scale"].as_float()
        if is_causal(node):
            from hdexport.attention.dense.openvino_causal import CausalParts, attend_causally

            causal = parts.once((CausalParts, key_mask), lambda: CausalParts(op, key_mask, padded=parts.padded))
            replace_result(node, attend_causally(op, states_of(node), causal, scale=scale))
            return True
        states = [transpose_heads_and_tokens(op, state) for state in states_of(node)]
        if not parts.padded:
            attended = op.Attention(*states, scale=scale)
        else:
            mask = parts.once((_Mask, key_mask), lambda: _mask(op, key_mask))
            attended = op.Mul(op.Attention(*states, mask.bias, scale=scale), mask.defined)
        replace_result(node, transpose_heads_and_tokens(op, attended))
        return True


LOWERING = _DenseLowering()


class _Mask(NamedTuple):
    """Values computed from a mask, which all attentions over the same keys share.

    Attributes:
        bias: scores to add, [batch, 1, 1, tokens].
        defined: 1 for texts with a real key, [batch, 1, 1, 1]: other rows, which would be uniform, are 0 by definition.
    """

    bias: onnx_ir.Value
    defined: onnx_ir.Value


def _mask(op: OpBuilder, key_mask: onnx_ir.Value) -> _Mask:
    row = op.Unsqueeze(key_mask, [1, 2])  # [batch, 1, 1, tokens]
    return _Mask(op.Where(row, 0.0, MASKED), op.ReduceMax(upcast(op, row), [3], keepdims=1))


_HEAD_DIM_MULTIPLE = 8
"""``GroupQueryAttention`` takes heads whose size is a multiple of this number."""

_OUTPUTS = 3
"""``GroupQueryAttention`` has three outputs: attended values, and the cache's keys and values."""


class CausalMask:
    """Values computed from a key mask, [batch, tokens], bool, once for all causal attentions of a graph.

    Attributes:
        packed: the sequences without padding between and before their tokens.
        last_tokens: [batch], int32, index of the last real token of each packed sequence, and no less than 0.
        tokens: [], int32, number of tokens of a sequence with its padding.
    """

    def __init__(self, op: OpBuilder, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        self.packed = PackedTokens(op, key_mask)
        self.last_tokens = op.Cast(op.Sub(op.Max(self.packed.lengths, 1), 1), to=ir.DataType.INT32)
        self.tokens = op.Cast(op.Squeeze(op.Shape(key_mask, start=1, end=2)), to=ir.DataType.INT32)


def causal_attention(op: OpBuilder, node: onnx_ir.Node, mask: CausalMask, *, name: str) -> onnx_ir.Value:
    """The output of a node of causal attention, [batch, tokens, hidden].

    ``GroupQueryAttention`` without a cache is a flash attention if it is causal and its outputs for a cache are
    requested, and repeats no head of keys. Sequences with padding are packed; ``GroupQueryAttention`` takes their
    lengths. Heads of a size that it rejects have ``MultiHeadAttention``, causal and with all scores in memory.
    """
    import onnx_ir as ir

    if not _takes_heads_of(node):
        repeat_key_heads(op, node)
    states = merged_states(op, node)

    def unmasked(op: OpBuilder) -> onnx_ir.Value:
        return _causal(op, node, states, mask)

    def packed(op: OpBuilder) -> onnx_ir.Value:
        attended = _causal(op, node, mask.packed.pack(op, states), mask)
        return mask.packed.unpack(op, attended, 0.0)

    return cond(op, mask.packed.unmasked, unmasked, packed, name=name, dtype=ir.DataType.FLOAT)


def _takes_heads_of(node: onnx_ir.Node) -> bool:
    return int(shape_of(node.inputs[0])[3]) % _HEAD_DIM_MULTIPLE == 0


def _causal(op: OpBuilder, node: onnx_ir.Node, states: Sequence[onnx_ir.Value], mask: CausalMask) -> onnx_ir.Value:
    if not _takes_heads_of(node):
        return fused_attention(op, node, states, causal=True)
    heads, kv_heads = map(heads_of, node.inputs[:2])
    attended, *_ = op.GroupQueryAttention(
        *states,
        None,
        None,
        mask.last_tokens,
        mask.tokens,
        _domain=CONTRIB_DOMAIN,
        _outputs=_OUTPUTS,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=node.attributes["scale"].as_float(),
    )
    return attended
