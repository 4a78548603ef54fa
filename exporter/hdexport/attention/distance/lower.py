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

from hdexport.lowering.bias_by_distance import SCORES, bias_by_distance, has_shared_numbers
from hdexport.lowering.lowering import ENGINES, Lowering, SharedParts
from hdexport.lowering.multi_head_attention import KeyMask, choice, masked_choice
from hdexport.lowering.nodes import Insertion, merged_states, operator_nodes, replace_by_merged, token_mask_of
from hdexport.lowering.short_texts import are_at_most

if TYPE_CHECKING:
    import onnx_ir

_LONGEST_FUSED, _LONGEST_FUSED_ALONE = 2048, 256
"""Tokens up to which a bias pays, for layers that share it and for one alone."""


class _DistanceLowering(Lowering):
    """Sequential bodies; short texts are fused where all texts and queries share the numbers of distances."""

    operator = "ClippedDistanceAttention"
    fused: ClassVar = {ENGINES: ("float16", "bfloat16")}
    fuses_short_texts = True

    def is_dense(self, node: onnx_ir.Node) -> bool:
        return has_shared_numbers(node)

    def has_bias(self, node: onnx_ir.Node) -> bool:
        return True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        import onnx_ir as ir

        # How many layers share the numbers of distances.
        layers = parts.once(
            (self, "layers"),
            lambda: Counter(each.inputs[SCORES] for each in operator_nodes(parts.model, self.operator)),
        )
        insertion, key_mask, scores = Insertion(node), token_mask_of(node), node.inputs[SCORES]
        super().for_onnxruntime_cpu(node, parts)
        if not has_shared_numbers(node):
            return
        longest = _LONGEST_FUSED if layers[scores] > 1 else _LONGEST_FUSED_ALONE
        mask = parts.once((KeyMask, key_mask), lambda: KeyMask(insertion, key_mask))
        is_short = parts.once((self, key_mask, longest), lambda: are_at_most(insertion, key_mask, longest))
        name = parts.new_name("distances")
        bias = bias_by_distance(insertion, node, parts, by_rows=True, is_short=is_short)
        fused = masked_choice(node, merged_states(insertion, node), mask, bias=bias, name=f"{name}_fused")
        attended = ir.node(node.op_type, node.inputs, attributes=node.attributes, domain=node.domain)
        # A branch that ends with a Reshape copies what it returns: here the one that takes longer anyway.
        sequence = ir.node("Reshape", [attended.outputs[0], insertion.integers([0, 0, -1])])
        by_length = choice(is_short, then=[fused], otherwise=[attended, sequence], name=name, dtype=ir.DataType.FLOAT)
        replace_by_merged(insertion, node, insertion.insert(by_length))


LOWERING = _DistanceLowering()
