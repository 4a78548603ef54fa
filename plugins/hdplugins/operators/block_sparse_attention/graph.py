"""Block-sparse attention as function bodies of standard ONNX operators, with memory linear in tokens.

A block of queries meets the first blocks, the last one, its neighbours, and those that the table lists for it, joined
into one span of keys: scores are [..., block, span], never [tokens, tokens]. A bias of [blocks, span] says how often a
key counts: 0 is once, log(m) is m times, and what is hidden, or already there in another way, is far below. The few
queries of global blocks meet all keys, and so do texts that are attended to densely.

The blocks come in two orders. In parallel they are one batch of products, which TensorRT fuses: the text is cut into
blocks by reshaping, neighbours are the same blocks shifted, and only listed blocks are gathered. Short texts are
computed densely in a branch that runs where there are any; it sees no more keys than the longest short text has, for
TensorRT plans memory for the largest shapes. Sequentially they are a Scan, one block of one text per step, which fits
in a CPU's caches at any batch size; a step gathers what it sees. The rows of global blocks come from a separate Scan,
one head per step, so that no step holds all keys of all heads. Three quarters of the sequential time are products.

Everything but query, key and value comes from `token_mask`, not from their shapes: ONNX Runtime sees then that all
layers of a model need the same tables, and computes them once.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.block_sparse_attention import OPERATOR
from hdplugins.operators.block_sparse_attention.onnx_parallel import parallel
from hdplugins.operators.block_sparse_attention.onnx_parts import Parts
from hdplugins.operators.block_sparse_attention.onnx_sequential import sequential
from hdplugins.operators.block_sparse_attention.onnx_tables import tables
from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder

_NAME = OPERATOR.name
_INPUTS = OPERATOR.inputs


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
        inputs: of the node; 4, or 5 with a table of blocks.
        attributes: of the node; which blocks there are decides the body, how many of them it reads from each node.
        order: of the blocks.
        tokens_first: the function takes and returns [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: there is no body for that number of inputs, or the queries of a long text would see nothing at all.
    """
    if inputs not in (4, 5):
        raise ValueError(f"{_NAME} has 4 or 5 inputs, not {inputs}.")
    parts = Parts.of(attributes, listed=inputs == 5)
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text = tables(parts) + parallel(parts)
    else:
        text = tables(parts) + sequential(parts, tokens_first=tokens_first)
    nodes = nodes_of(text, inputs=_INPUTS[:inputs], attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix=parts.suffix + "_tokensfirst" * tokens_first, inputs=inputs)
