"""Block-sparse attention: a sequential body on a CPU, groups of blocks in OpenVINO.

In ONNX Runtime on a CPU, the blocks are computed one after another, or all keys at once where every query sees every
key.

In OpenVINO, groups of blocks of queries attend to the keys that any of the blocks sees. All groups of all texts are one
batch of the standard's ``Attention``, which OpenVINO fuses with its mask; the rows of global blocks are another batch.
Texts that are attended to densely are one group that sees every key, if all texts are. The tokens of a group, the keys
of a group, and the times that a key counts are made once for all layers alike (`openvino_groups.py`); a layer copies
rows of its states by these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hdexport.lowering.lowering import Lowering, SharedParts
from hdexport.lowering.multi_head_attention import choice, fused_attention
from hdexport.lowering.nodes import (
    Insertion,
    attributes_of,
    heads_of,
    merge_heads,
    replace_by_merged,
    sequential_node,
    states_tokens_first,
)
from hdexport.lowering.openvino_functions import OpenVinoForm, call_function, call_once
from hdexport.lowering.short_texts import are_dense
from hdruntime.backends.openvino import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir

_STATES = 3
"""Inputs before the mask, [batch, tokens], and the table of listed blocks."""


class _BlocksLowering(Lowering, OpenVinoForm):
    """Sequential bodies, or all keys at once where every query sees every key; groups of blocks in OpenVINO."""

    operator = "BlockSparseAttention"
    fused: ClassVar = {OPENVINO_LOWERING: ("float32",)}
    fuses_short_texts = True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        from hdplugins.attention.blocks.tables import longest_dense

        insertion = Insertion(node)
        states = states_tokens_first(insertion, node)
        sparse = sequential_node(parts.model, node, states)
        longest, name = (
            longest_dense(attributes_of(node), listed=len(node.inputs) > _STATES + 1),
            parts.new_name("blocks"),
        )
        if longest > 0:
            is_dense = are_dense(insertion, node, parts, longest)
            sparse = _choice(insertion, node, states, sparse, is_dense, name=name)
        replace_by_merged(insertion, node, merge_heads(insertion, insertion.insert(sparse)))

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        from hdexport.attention.blocks.openvino_groups import attend_in_groups, group_tables
        from hdplugins.attention.blocks.tables import Parts, longest_dense

        insertion = Insertion(node)
        attributes = attributes_of(node)
        token_mask, *listed = (value for value in node.inputs[_STATES:] if value is not None)
        states = states_tokens_first(insertion, node)
        table = call_once(
            insertion,
            parts,
            group_tables,
            [token_mask, *listed],
            parts=Parts.of(attributes, listed=bool(listed)),
            block=attributes["block_size"],
            first=attributes["first_global"],
            repeats=attributes["first_repeats"],
            longest_dense=longest_dense(attributes, listed=bool(listed)),
            heads=heads_of(node.inputs[0]),
        )
        (attended,) = call_function(insertion, parts, attend_in_groups, [*states, *table], scale=attributes["scale"])
        replace_by_merged(insertion, node, merge_heads(insertion, attended))
        return False


LOWERING = _BlocksLowering()


def _choice(
    insertion: Insertion,
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    sparse: onnx_ir.Node,
    is_dense: onnx_ir.Value,
    *,
    name: str,
) -> onnx_ir.Node:
    """A node that gives [batch, tokens, heads, head_dim], by the fused attention where every query sees every key."""
    import onnx_ir as ir

    fused = fused_attention(node, [merge_heads(insertion, state) for state in states])
    # A branch that ends with a Reshape copies what it returns: here the one of short texts.
    to_heads = insertion.integers([0, 0, heads_of(node.inputs[0]), -1])
    split = ir.node("Reshape", [fused.outputs[0], to_heads])
    return choice(is_dense, then=[fused, split], otherwise=[sparse], name=name, dtype=ir.DataType.FLOAT)
