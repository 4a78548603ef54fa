"""Disentangled attention as function bodies of standard ONNX operators, with memory linear in tokens.

The products of keys with the rows of their table are computed once, [..., rows, tokens]. A Scan then takes one block of
queries after another: it multiplies the block with the rows of the other table, [..., block, rows], and gathers from
both products what belongs to each distance.

The blocks come in two orders. In parallel, a step takes a block of all heads of all texts, which is a batch of products
for a GPU. In sequence, a step takes a block of one head of one text, gathers for the keys around it alone, and has one
number per query and one per key for those that are farther away.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.disentangled_attention import OPERATOR
from hdplugins.operators.disentangled_attention.onnx_parallel import PARALLEL
from hdplugins.operators.disentangled_attention.onnx_sequential import sequential
from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder
from hdplugins.operators.reach import check_reach


def function_of_node(
    *,
    inputs: int,
    attributes: Mapping[str, Any],
    order: BlockOrder = BlockOrder.PARALLEL,
    tokens_first: bool = False,
) -> onnx.FunctionProto:
    """The body for a node of the portable graph, and for all others.

    Args:
        inputs: of the node: 7.
        attributes: of the node; the body reads them itself.
        order: of the blocks of queries.
        tokens_first: the states and the result are [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: another number of inputs, or a reach that defines nothing.
    """
    if inputs != len(OPERATOR.inputs):
        raise ValueError(f"{OPERATOR.name} has {len(OPERATOR.inputs)} inputs, not {inputs}.")
    check_reach(attributes["reach"])
    assert not (tokens_first and order is BlockOrder.PARALLEL)
    text = PARALLEL if order is BlockOrder.PARALLEL else sequential(tokens_first=tokens_first)
    nodes = nodes_of(text, inputs=OPERATOR.inputs, attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix="_tokensfirst" * tokens_first, inputs=inputs)
