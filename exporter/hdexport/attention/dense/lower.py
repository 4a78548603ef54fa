"""Dense attention: fused by every backend, and without a mask where no token is padding.

The runtime feeds padding only where it cannot be avoided. Causal attention needs no mask even there.

``com.microsoft::MultiHeadAttention`` is a flash attention unless it is causal, ``com.microsoft::GroupQueryAttention``
only if it is. Milliseconds of one layer and one text, and megabytes of growth, in ONNX Runtime 1.31.1 on two cores of
an AMD EPYC:

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

In OpenVINO, dense attention is the standard's ``Attention``. Causal attention has a mask even without padding: OpenVINO
2026.4.1 makes a mask of all queries and keys of the standard's ``is_causal``, in each layer anew. Here all layers share
it, 64 MB for a text of 4096 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hdexport.lowering.lowering import ENGINES, Lowering, SharedParts
from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN, KeyMask, choice, fused_attention, masked_choice
from hdexport.lowering.nodes import (
    Insertion,
    heads_of,
    is_causal,
    merged_states,
    repeat_key_heads,
    replace_by_merged,
    replace_result,
    shape_of,
    states_of,
    swap_heads_and_tokens,
    token_mask_of,
)
from hdexport.lowering.openvino_functions import OpenVinoForm
from hdexport.lowering.packed_tokens import PackedTokens
from hdruntime.backends.onnxruntime import CPU_LOWERING, CUDA_LOWERING
from hdruntime.backends.openvino import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir

_MASKED_SCORE = -1.0e30
"""Added to masked scores; exp() of it is exactly 0 beside any real score."""


class _DenseLowering(Lowering, OpenVinoForm):
    """A fused kernel of each backend; ONNX Runtime and OpenVINO widen half precision on a CPU."""

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
        insertion, key_mask, name = Insertion(node), token_mask_of(node), parts.new_name("attention")
        if is_causal(node):
            causal_mask = parts.once((CausalMask, key_mask), lambda: CausalMask(insertion, key_mask))
            attended = causal_choice(insertion, node, causal_mask, name=name)
        else:
            mask = parts.once((KeyMask, key_mask), lambda: KeyMask(insertion, key_mask))
            repeat_key_heads(insertion, node)
            attended = masked_choice(node, merged_states(insertion, node), mask, name=name)
        replace_by_merged(insertion, node, insertion.insert(attended))

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        insertion, causal = Insertion(node), is_causal(node)
        # OpenVINO 2026.4.1 loads no groups but one of all heads.
        repeat_key_heads(insertion, node)
        key_mask = token_mask_of(node)
        mask = parts.once(
            (_Mask, key_mask, causal), lambda: _mask(insertion, key_mask, causal=causal, padded=parts.padded)
        )
        states = [swap_heads_and_tokens(insertion, state) for state in states_of(node)]
        states += [] if mask.bias is None else [mask.bias]
        attended = insertion.op("Attention", states, {"scale": node.attributes["scale"].as_float()})
        if mask.defined is not None:
            attended = insertion.op("Mul", [attended, mask.defined])
        replace_result(node, swap_heads_and_tokens(insertion, attended))
        return True


LOWERING = _DenseLowering()


class _Mask(NamedTuple):
    """The parts of a mask that all attentions over the same keys share.

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
    nothing, masked = map(insertion.number, (0.0, _MASKED_SCORE))
    return insertion.op("Where", [seen, nothing, masked])


_HEAD_DIM_MULTIPLE = 8
"""The sizes of a head that ``GroupQueryAttention`` takes are multiples of it."""

_OUTPUTS = 3
"""``GroupQueryAttention`` has three outputs: attended values, and the cache's keys and values."""


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
        self.zero = insertion.number(0.0)


def causal_choice(insertion: Insertion, node: onnx_ir.Node, mask: CausalMask, *, name: str) -> onnx_ir.Node:
    """A node, in the place of one of causal attention, that gives [batch, tokens, hidden].

    ``GroupQueryAttention`` without a cache is a flash attention if it is causal and its outputs for a cache are asked
    for, and repeats no head of keys. Texts with padding are packed; it takes their lengths. Heads of a size that it
    refuses have ``MultiHeadAttention``, causal and with all scores in memory.
    """
    import onnx_ir as ir

    if not _takes_heads_of(node):
        repeat_key_heads(insertion, node)
    states = merged_states(insertion, node)
    attend = functools.partial(_attention, node, mask=mask)
    otherwise = mask.packed.around(states, attend, mask.zero)
    return choice(mask.packed.unmasked, then=[attend(states)], otherwise=otherwise, name=name, dtype=ir.DataType.FLOAT)


def _takes_heads_of(node: onnx_ir.Node) -> bool:
    return int(shape_of(node.inputs[0])[3]) % _HEAD_DIM_MULTIPLE == 0


def _attention(node: onnx_ir.Node, states: Sequence[onnx_ir.Value], mask: CausalMask) -> onnx_ir.Node:
    import onnx_ir as ir

    if not _takes_heads_of(node):
        return fused_attention(node, states, causal=True)
    heads, kv_heads = map(heads_of, node.inputs[:2])
    return ir.node(
        "GroupQueryAttention",
        [*states, None, None, mask.last_tokens, mask.tokens],
        {"num_heads": heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()},
        domain=CONTRIB_DOMAIN,
        num_outputs=_OUTPUTS,
    )
