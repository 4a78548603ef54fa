"""Relative attention as function bodies of standard ONNX operators, with memory linear in tokens and in keys.

A Scan takes one block of queries after another. Of positions, a block takes the rows between its last query's distance
from the first key and its first query's distance from the last key, so that its scores are [queries, keys + queries]
before they are shifted, and [queries, keys] after that.

The blocks come in two orders. In parallel, a step takes a block of all heads of all texts, which is a batch of products
for a GPU: all blocks at once would be scores of [heads, tokens, keys]. In sequence, a step takes a block of one head of
one text, whose scores fit in a CPU's cache at any batch size. CPU milliseconds and megabytes of growth on one core of
an Intel Xeon, 12 heads of 64; beside it Hugging Face's module of XLNet in PyTorch, without its projections:

======  ====  ========  ==========  ============
tokens  keys  segments  sequential  Hugging Face
======  ====  ========  ==========  ============
512     1024  no        31 (24)     191 (132)
512     1024  yes       36 (26)     206 (131)
4096    4608  no        1075 (119)  10837 (3548)
======  ====  ========  ==========  ============
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder
from hdplugins.operators.relative_attention import OPERATOR
from hdplugins.operators.relative_attention.distances import check_distances
from hdplugins.operators.relative_attention.onnx_parallel import parallel
from hdplugins.operators.relative_attention.onnx_sequential import sequential

_NAME, _INPUTS = OPERATOR.name, OPERATOR.inputs


def function_of_node(
    *,
    inputs: int,
    attributes: Mapping[str, Any],
    order: BlockOrder = BlockOrder.PARALLEL,
    tokens_first: bool = False,
) -> onnx.FunctionProto:
    """The body for a node of the portable graph, and for others of that name.

    Bodies that differ need names that differ: TensorRT-RTX 1.7.1 gives every node of one name the same body.

    Args:
        inputs: of the node: 7, or 8 with ``segment_scores``.
        attributes: of the node; all but ``scale`` decide the body.
        order: of the blocks of queries.
        tokens_first: the states and the result are [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: another number of inputs, or attributes that define nothing.
    """
    if inputs not in (len(_INPUTS) - 1, len(_INPUTS)):
        raise ValueError(f"{_NAME} has {len(_INPUTS) - 1} or {len(_INPUTS)} inputs, not {inputs}.")
    causal, reach, segments = attributes["causal"], attributes["reach"], inputs == len(_INPUTS)
    check_distances(causal=causal, reach=reach)
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text = parallel(causal=bool(causal), reach=reach, segments=segments)
    else:
        text = sequential(causal=bool(causal), reach=reach, segments=segments, tokens_first=tokens_first)
    suffix = "_causal" * causal + f"_reach{reach}" * bool(reach) + "_segments" * segments
    nodes = nodes_of(text, inputs=_INPUTS[:inputs], attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix=suffix + "_tokensfirst" * tokens_first, inputs=inputs)
