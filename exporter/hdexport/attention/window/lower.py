"""Sliding-window attention: a blockwise body on a CPU, blocks against spans in OpenVINO.

In ONNX Runtime on a CPU, the blocks are computed one after another, or all keys at once where a window covers the text.
A text without padding, no longer than a window's reach on its shorter side and the query itself, is attended to densely
by definition. The fused attention does that in half to two thirds of the time that the blocks take: CPU milliseconds in
ONNX Runtime 1.31.1 on one core of an AMD EPYC, 12 heads of 64, batch 1, the window as wide as it takes:

======  ======  =====
tokens  blocks  fused
======  ======  =====
64      0.17    0.10
257     2.0     1.1
1024    21      15
2048    92      59
======  ======  =====

In OpenVINO, blocks of queries attend to the span of keys that their windows reach. All blocks of all texts are one
batch of the standard's ``Attention``, which OpenVINO fuses with its mask. The tokens of a block, the tokens of its
span, and the mask are made once for all layers alike; a layer copies the rows of its states by these tables
(`openvino_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hdexport.lowering.lowering import Lowering, SharedParts
from hdexport.lowering.nodes import attributes_of, group_of, heads_of, replace_result, states_of, token_mask_of
from hdexport.lowering.openvino_functions import OpenVinoLowering, call_function, call_once
from hdexport.lowering.short_sequences import fuse_short_sequences
from hdplugins.op_builder import OpBuilder
from hdruntime.backends.openvino import OPENVINO_LOWERING

if TYPE_CHECKING:
    import onnx_ir


class _WindowLowering(Lowering, OpenVinoLowering):
    """Blockwise bodies, or all keys at once where a window covers the text; blocks against spans in OpenVINO."""

    operator = "SlidingWindowAttention"
    fused: ClassVar = {OPENVINO_LOWERING: ("float32",)}
    fuses_short_sequences = True

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        super().for_onnxruntime_cpu(node, parts)
        attributes, name = attributes_of(node), parts.new_name("window")
        # However short the text, a dilated head does not see all of it.
        if max(attributes["dilation"]) == 1:
            longest = min(attributes["left"], attributes["right"]) + 1
            fuse_short_sequences(node, parts, max_tokens=longest, name=name)

    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        from hdexport.attention.window.openvino_blocks import attend_in_blocks, window_tables

        op = OpBuilder.before(node)
        # 0 for padding, 1 for local tokens, 2 for global ones, -1 for unseen ones
        attributes, token_kind = attributes_of(node), token_mask_of(node)
        heads = heads_of(node.inputs[0])
        dilation = list(attributes["dilation"])
        steps = dilation * (heads // len(dilation))
        states, group = states_of(node), group_of(node)
        window = {"left": attributes["left"], "right": attributes["right"], "bound": attributes["global_bound"]}
        of_steps = []
        for step in sorted(set(steps)):
            of_step = [head for head in range(heads) if steps[head] == step]
            chosen, shared = states, group
            if len(of_step) != heads:
                chosen, shared = _states_of_heads(op, states, of_step, group), 1
            table = call_once(op, parts, window_tables, [token_kind], **window, step=step, group=shared)
            (attended,) = call_function(
                op,
                parts,
                attend_in_blocks,
                [*chosen, *table, token_kind],
                step=step,
                grouped=shared > 1,
                padded=parts.padded,
                scale=attributes["scale"],
            )
            of_steps.append(attended)
        replace_result(node, of_steps[0] if len(of_steps) == 1 else _joined(op, of_steps, steps))
        return True


LOWERING = _WindowLowering()


def _states_of_heads(
    op: OpBuilder, states: Sequence[onnx_ir.Value], heads: Sequence[int], group: int
) -> list[onnx_ir.Value]:
    """The states of some heads of queries, each with keys and values of its own."""
    query, *others = states
    own = [head // group for head in heads]
    return [_heads(op, query, heads), *(_heads(op, state, own) for state in others)]


def _heads(op: OpBuilder, state: onnx_ir.Value, heads: Sequence[int]) -> onnx_ir.Value:
    """Some heads of [batch, tokens, heads, head_dim]."""
    return op.Gather(state, list(heads), axis=2)


def _joined(op: OpBuilder, of_steps: Sequence[onnx_ir.Value], steps: Sequence[int]) -> onnx_ir.Value:
    """The heads of all steps, [batch, tokens, heads, head_dim], in their order."""
    joined = op.Concat(*of_steps, axis=2)
    # A stable sort by step is the order in which the steps hold the heads.
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return _heads(op, joined, [order.index(head) for head in range(len(steps))])
