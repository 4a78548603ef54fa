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

__all__ = ["lower_clipped_distance_attention"]

from collections import Counter
from typing import TYPE_CHECKING

from hdexport.graph.lowering.bias_by_distance import BiasesByDistance, has_shared_numbers
from hdexport.graph.lowering.multi_head_attention import (
    Insertion,
    choice,
    merge_heads,
    replace_by_merged,
    states_tokens_first,
)
from hdexport.graph.lowering.onnxruntime_cpu.key_masks import KeyMask, masked_choice
from hdexport.graph.lowering.onnxruntime_cpu.sequential_bodies import sequential_node
from hdexport.graph.passes.graph_nodes import operator_nodes

if TYPE_CHECKING:
    import onnx_ir

_LONGEST_FUSED, _LONGEST_FUSED_ALONE = 2048, 256
"""Tokens up to which a bias pays, for layers that share it and for one alone."""

_KEY_MASK, _SCORES = 3, 4
"""Positions of these inputs."""


def lower_clipped_distance_attention(model: onnx_ir.Model) -> None:
    """Give the nodes ``ClippedDistanceAttention`` of a float32 graph their sequential bodies, in place.

    Where all texts and queries share the numbers of distances, short texts are fused instead.
    """
    import onnx_ir as ir

    nodes = operator_nodes(model, "ClippedDistanceAttention")
    layers = Counter(node.inputs[_SCORES] for node in nodes)
    biases = BiasesByDistance(model, by_rows=True)
    masks: dict[onnx_ir.Value, KeyMask] = {}
    lengths: dict[tuple[onnx_ir.Value, int], onnx_ir.Value] = {}
    for number, node in enumerate(nodes):
        insertion, key_mask = Insertion(node), node.inputs[_KEY_MASK]
        assert key_mask is not None
        states = states_tokens_first(insertion, node)
        attended = sequential_node(model, node, states)
        if has_shared_numbers(node):
            longest = _LONGEST_FUSED if layers[node.inputs[_SCORES]] > 1 else _LONGEST_FUSED_ALONE
            if key_mask not in masks:
                masks[key_mask] = KeyMask(insertion, key_mask)
            if (key_mask, longest) not in lengths:
                lengths[key_mask, longest] = _is_at_most(insertion, key_mask, longest)
            is_short, name = lengths[key_mask, longest], f"distances_{number}"
            bias = biases.of(insertion, node, is_short)
            merged = [merge_heads(insertion, state) for state in states]
            fused = masked_choice(node, merged, masks[key_mask], bias=bias, name=f"{name}_fused")
            # A branch that ends with a Reshape copies what it returns: here the one that takes longer anyway.
            sequence = ir.node("Reshape", [attended.outputs[0], insertion.integers([0, 0, -1])])
            by_length = choice(
                is_short, then=[fused], otherwise=[attended, sequence], name=name, dtype=ir.DataType.FLOAT
            )
            replace_by_merged(insertion, node, insertion.insert(by_length))
        else:
            replace_by_merged(insertion, node, merge_heads(insertion, insertion.insert(attended)))


def _is_at_most(insertion: Insertion, key_mask: onnx_ir.Value, longest: int) -> onnx_ir.Value:
    """[], bool."""
    tokens = insertion.op("Squeeze", [insertion.op("Shape", [key_mask], {"start": 1, "end": 2})])
    return insertion.op("LessOrEqual", [tokens, insertion.op("Constant", [], {"value_int": longest})])
