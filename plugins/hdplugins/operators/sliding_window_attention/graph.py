"""Sliding-window attention as function bodies of standard ONNX operators, with memory linear in tokens.

The queries are cut into blocks, and each block meets the span of keys that its windows reach: scores are [..., block,
span], never [tokens, tokens]. Two tables say which tokens make a block and its span. They are computed from the length
of the text: no length needs to be a multiple of anything, and a span is never longer than the text. A head of dilation
D is D windows over every D-th token, one per residue class: an axis of the tables. Global tokens are copied behind the
keys, or found where they are, and joined to every span, so that one softmax covers both.

The blocks come in two orders. In parallel they are one batch of products, which TensorRT fuses; the size of a block
must not depend on the length then, or TensorRT's bounds multiply to gigabytes of planned memory. Sequentially they are
a Scan, one block of one text per step, which fits in a CPU's caches at any batch size: about as fast in ONNX Runtime,
with a tenth of the memory. CPU milliseconds and megabytes of growth in ONNX Runtime 1.31 on two cores, 12 heads of 64,
a window of 256 tokens each side:

======  ==========  ==========  ==========================
tokens  parallel    sequential  dense (MultiHeadAttention)
======  ==========  ==========  ==========================
2048    48 (181)    49 (19)     64 (19)
4096    95 (361)    99 (26)     237 (37)
8192    180 (706)   198 (40)    950 (58)
16384   353 (1412)  405 (69)    4368 (114)
======  ==========  ==========  ==========================

With a block of every text per step, 8 texts of 512 tokens took 40 % longer on one core and twice the memory. Two thirds
of the sequential time are the two products, at the processor's peak; slicing spans instead of gathering them, masks
computed once for all layers and MultiHeadAttention inside a step gained 5 % at most.

Everything but query, key and value comes from `token_kind`, not from their shapes: ONNX Runtime sees then that all
layers of a model need the same tables and masks, and computes them once.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder
from hdplugins.operators.sliding_window_attention import OPERATOR
from hdplugins.operators.sliding_window_attention.onnx_orders import block_size, in_order
from hdplugins.operators.sliding_window_attention.onnx_parts import CLOSING, ROWS, heads_of_step, shared, tables

_NAME, _INPUTS, _ATTRIBUTES = OPERATOR.name, OPERATOR.inputs, OPERATOR.attributes


def function_of_node(
    *, inputs: int, attributes: Mapping[str, Any], grouped: bool = False, order: BlockOrder = BlockOrder.PARALLEL
) -> onnx.FunctionProto:
    """The body for a node of the portable graph, and for others of that name.

    Bodies that differ need names that differ. Overloads of one name would be the standard's way, but TensorRT-RTX 1.7.1
    gives every node the first overload without warning.

    Args:
        inputs: of the node; 4.
        attributes: of the node; ``left``, ``right`` and ``scale`` are read from each. ``global_bound`` is the most
            global tokens that a text may hold; 0 leaves out all that they need. The answer for a text with more is
            undefined. TensorRT takes up to 3840.
        grouped: whether key and value have fewer heads than query; how many, each node's shapes say.
        order: of the blocks.

    Raises:
        ValueError: another number of inputs, a dilation below 1, none at all, or a negative bound.
    """
    if inputs != len(_INPUTS):
        raise ValueError(f"{_NAME} has {len(_INPUTS)} inputs, not {inputs}.")
    dilation, bound = attributes["dilation"], attributes["global_bound"]
    if not dilation or min(dilation) < 1:
        raise ValueError(
            f"The dilation {list(dilation)} is invalid: give one value of 1 or more per head, or a single one."
        )
    if bound < 0:
        raise ValueError(f"The bound of {bound} global tokens is negative.")
    # A step of a Scan reads one text, so its global tokens are found where they are.
    nodes = _nodes(shared(bound=bound, appended=order is BlockOrder.PARALLEL))
    steps = sorted(set(dilation))
    for step in steps:
        heads = [head for head, of_head in enumerate(dilation) if of_head == step] if len(steps) > 1 else None
        nodes += _nodes_of_step(step, heads, bound=bound, grouped=grouped, order=order)
    nodes += _nodes(_join_of_heads(dilation) + CLOSING)
    return function(OPERATOR, nodes, suffix=_suffix(dilation, bound, grouped), inputs=inputs)


def _nodes_of_step(
    step: int, heads: list[int] | None, *, bound: int, grouped: bool, order: BlockOrder
) -> list[onnx.NodeProto]:
    """The nodes that make ``sums_<step>`` of the given heads, None for all."""
    text = tables(step=step, block_size=block_size(order)) + heads_of_step(heads, grouped=grouped)
    text += in_order(order, bound=bound, grouped=grouped and heads is None) + ROWS
    nodes = _nodes(text)
    _add_suffix(nodes, f"_{step}", set())
    return nodes


def _suffix(dilation: Sequence[int], bound: int, grouped: bool) -> str:
    steps = list(dilation) if len(set(dilation)) > 1 else [dilation[0]]
    suffix = ("_grouped" if grouped else "") + (f"_global{bound}" if bound else "")
    return suffix + ("" if steps == [1] else "_dilation" + "_".join(map(str, steps)))


def _join_of_heads(dilation: Sequence[int]) -> str:
    """Text that puts the heads of all steps back into their order."""
    steps = sorted(set(dilation))
    if len(steps) == 1:
        return f"joined = Identity (sums_{steps[0]})\n"
    # A stable sort by step is the order in which the steps hold the heads.
    order = sorted(range(len(dilation)), key=lambda head: dilation[head])
    places = [order.index(head) for head in range(len(dilation))]
    return f"""
    sums = Concat <axis = 1> ({", ".join(f"sums_{step}" for step in steps)})
    places = Constant <value_ints = {places}> ()
    joined = Gather <axis = 1> (sums, places)
"""


def _nodes(text: str) -> list[onnx.NodeProto]:
    return nodes_of(text, inputs=_INPUTS, attributes=_ATTRIBUTES)


def _add_suffix(nodes: Sequence[onnx.NodeProto], suffix: str, names: set[str]) -> None:
    """Rename, in place, the values in ``names`` and those that the nodes themselves make."""
    names = names | {name for node in nodes for name in node.output}
    for node in nodes:
        node.input[:] = [name + suffix if name in names else name for name in node.input]
        node.output[:] = [name + suffix for name in node.output]
        for graph in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
            _add_suffix(graph.node, suffix, names | {value.name for value in graph.input})
            for value in (*graph.input, *graph.output):
                value.name += suffix
