"""Attention by clipped distance as function bodies of standard ONNX operators, with memory linear in tokens.

A Scan takes one block of queries after another. Its numbers by distance become numbers by key for the keys around it,
by a shift of each row; those of keys farther away are the ones at its edges. With values by distance, the block's
weights are shifted back, and multiplied with the table.

The blocks come in two orders. In parallel, a step takes a block of all heads of all texts, which is a batch of products
for a GPU. In sequence, a step takes a block of one head of one text, whose scores fit in a CPU's cache at any batch
size.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.clipped_distance_attention import OPERATOR
from hdplugins.operators.clipped_distance_attention.onnx_parallel import parallel
from hdplugins.operators.clipped_distance_attention.onnx_sequential import sequential
from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder
from hdplugins.operators.reach import check_reach

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
        inputs: of the node: 5, or 6 with ``values_by_distance``.
        attributes: of the node; the body reads them itself.
        order: of the blocks of queries.
        tokens_first: the states and the result are [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: another number of inputs, or a reach that defines nothing.
    """
    if inputs not in (len(_INPUTS) - 1, len(_INPUTS)):
        raise ValueError(f"{_NAME} has {len(_INPUTS) - 1} or {len(_INPUTS)} inputs, not {inputs}.")
    check_reach(attributes["reach"])
    values = inputs == len(_INPUTS)
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text = parallel(values=values)
    else:
        text = sequential(values=values, tokens_first=tokens_first)
    nodes = nodes_of(text, inputs=_INPUTS[:inputs], attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix="_values" * values + "_tokensfirst" * tokens_first, inputs=inputs)
