"""Attention by clipped distance on a CPU: blocks one after another, or fused with a bias, which is quadratic.

Where all texts and queries share the numbers of distances, the fused attention takes them as a bias for every query
and key. Making that takes longer than a layer saves, so what counts is how many layers share it. CPU milliseconds of a
layer in ONNX Runtime 1.31.1 on one core of an AMD EPYC, 12 heads of 64, a reach of 128, batch 1:

======  ======  =====  ====
tokens  blocks  fused  bias
======  ======  =====  ====
128     2.1     1.1    0.2
256     4.3     2.9    0.7
512     13      11     3.1
1024    48      41     18
2048    226     165    115
======  ======  =====  ====

At four texts the ratios are the same. Four layers of MPNet-base's shape take as long as with a bias that the graph
looks up for each pair of tokens: 0.97 of its time for a text of 512 tokens, 1.00 for three of which one is padded, 1.02
for one of 2048 (medians of three processes each, in turn).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from hdexport.lowering.lowering import ENGINES, Lowering, SharedParts
from hdexport.lowering.multi_head_attention import KeyMask, masked_attention
from hdexport.lowering.nodes import (
    merge_heads,
    merged_states,
    operator_nodes,
    replace_by_merged,
    same_node,
    token_mask_of,
)
from hdexport.lowering.relative_position_bias import SCORES, has_shared_bias, relative_position_bias
from hdexport.lowering.short_sequences import are_at_most
from hdplugins.op_builder import OpBuilder, cond

if TYPE_CHECKING:
    import onnx_ir

_LONGEST_FUSED, _LONGEST_FUSED_ALONE = 2048, 256
"""Largest number of tokens at which a bias pays, for layers that share it and for a single layer."""


class _DistanceLowering(Lowering):
    """Blockwise bodies; short sequences are fused where all sequences and queries share the relative position bias."""

    operator = "ClippedDistanceAttention"
    fused: ClassVar = {ENGINES: ("float16", "bfloat16")}
    fuses_short_sequences = True

    def is_dense(self, node: onnx_ir.Node) -> bool:
        return has_shared_bias(node)

    def has_bias(self, node: onnx_ir.Node) -> bool:
        return True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        import onnx_ir as ir

        # How many layers share a bias of each distance.
        layers = parts.once(
            (self, "layers"),
            lambda: Counter(each.inputs[SCORES] for each in operator_nodes(parts.model, self.operator)),
        )
        op, key_mask, scores = OpBuilder.before(node), token_mask_of(node), node.inputs[SCORES]
        super().for_onnxruntime_cpu(node, parts)
        if not has_shared_bias(node):
            return
        max_tokens = _LONGEST_FUSED if layers[scores] > 1 else _LONGEST_FUSED_ALONE
        mask = parts.once((KeyMask, key_mask), lambda: KeyMask(op, key_mask))
        is_short = parts.once((self, key_mask, max_tokens), lambda: are_at_most(op, key_mask, max_tokens))
        name = parts.new_name("distances")
        bias = relative_position_bias(op, node, parts, by_rows=True, is_short=is_short)
        states = merged_states(op, node)

        def fused(op: OpBuilder) -> onnx_ir.Value:
            return masked_attention(op, node, states, mask, bias=bias, name=f"{name}_fused")

        def blockwise(op: OpBuilder) -> onnx_ir.Value:
            # A branch that ends with a Reshape copies its output: here the branch that takes longer anyway.
            return merge_heads(op, same_node(op, node))

        attended = cond(op, is_short, fused, blockwise, name=name, dtype=ir.DataType.FLOAT)
        replace_by_merged(op, node, attended)


LOWERING = _DistanceLowering()
