"""Block-sparse attention: a blockwise body on a CPU, groups of blocks in OpenVINO.

In ONNX Runtime on a CPU, the blocks are computed one after another, or all keys at once where every query sees every
key.

In OpenVINO, groups of blocks of queries attend to the keys that any of the blocks sees. All groups of all texts are one
batch of the standard's ``Attention``, which OpenVINO fuses with its mask; the rows of global blocks are another batch.
Texts that are attended to densely are one group that sees every key, if all texts are. The tokens of a group, the keys
of a group, and the times that a key counts are made once for all layers alike (`openvino_groups.py`); a layer copies
rows of its states by these tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hdexport.lowering.lowering import Lowering, SharedParts
from hdexport.lowering.nodes import attributes_of, heads_of, replace_result, states_of
from hdexport.lowering.openvino_functions import OpenVinoLowering, call_function, call_once
from hdexport.lowering.short_sequences import fuse_short_sequences
from hdplugins.op_builder import OpBuilder
from hdruntime.backends.openvino import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir

_STATES = 3
"""Inputs before the mask, [batch, tokens], and the table of listed blocks."""


class _BlocksLowering(Lowering, OpenVinoLowering):
    """Blockwise bodies, or all keys at once where every query sees every key; groups of blocks in OpenVINO."""

    operator = "BlockSparseAttention"
    fused: ClassVar = {OPENVINO_LOWERING: ("float32",)}
    fuses_short_sequences = True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        from hdplugins.attention.blocks.tables import longest_dense

        super().for_onnxruntime_cpu(node, parts)
        longest = longest_dense(attributes_of(node), listed=len(node.inputs) > _STATES + 1)
        if longest > 0:
            fuse_short_sequences(node, parts, max_tokens=longest, name=parts.new_name("blocks"))

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        from hdexport.attention.blocks.openvino_groups import attend_in_groups, group_tables
        from hdplugins.attention.blocks.tables import Parts, longest_dense

        op = OpBuilder.before(node)
        attributes = attributes_of(node)
        token_mask, *listed = (value for value in node.inputs[_STATES:] if value is not None)
        table = call_once(
            op,
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
        (attended,) = call_function(op, parts, attend_in_groups, [*states_of(node), *table], scale=attributes["scale"])
        replace_result(node, attended)
        return False


LOWERING = _BlocksLowering()
