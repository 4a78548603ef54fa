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

__all__ = ["function_for", "function_name", "function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx
import onnx.helper

from hdplugins.constants import ONNX_DOMAIN, ONNX_OPSET
from hdplugins.operators.block_sparse_attention import OPERATOR
from hdplugins.operators.block_sparse_attention.onnx_parallel import parallel
from hdplugins.operators.block_sparse_attention.onnx_parts import Parts
from hdplugins.operators.block_sparse_attention.onnx_sequential import sequential
from hdplugins.operators.block_sparse_attention.onnx_tables import tables
from hdplugins.operators.onnx_text import BlockOrder, nodes_of

_NAME = OPERATOR.name
_INPUTS = OPERATOR.inputs


def function_name(*, attributes: Mapping[str, Any], listed: bool) -> str:
    """Operator type of the nodes with these attributes, once they have a body.

    Bodies that differ need names that differ: TensorRT-RTX 1.7.1 gives every node of one name the same body.

    Args:
        attributes: of the node.
        listed: whether it has a table of blocks.
    """
    return _NAME + Parts.of(attributes, listed=listed).suffix


def function_for(
    *,
    attributes: Mapping[str, Any],
    listed: bool,
    order: BlockOrder = BlockOrder.PARALLEL,
    tokens_first: bool = False,
) -> onnx.FunctionProto:
    """The body for the nodes with these attributes, and for others of that name.

    Args:
        attributes: of the node; which blocks there are decides the body, how many of them it reads from each node.
        listed: whether the node has a table of blocks.
        order: of the blocks.
        tokens_first: the function takes and returns [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: the queries of a long text would see nothing at all.
    """
    parts = Parts.of(attributes, listed=listed)
    inputs = _INPUTS if listed else _INPUTS[:-1]
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text = tables(parts) + parallel(parts)
    else:
        text = tables(parts) + sequential(parts, tokens_first=tokens_first)
    return onnx.helper.make_function(
        ONNX_DOMAIN,
        _NAME + parts.suffix + ("_tokensfirst" if tokens_first else ""),
        inputs,
        ["attended"],
        nodes_of(text, inputs=inputs, attributes=OPERATOR.attributes),
        [onnx.helper.make_opsetid("", ONNX_OPSET)],
        OPERATOR.attributes,
    )


def function_of_node(*, inputs: int, attributes: Mapping[str, Any]) -> onnx.FunctionProto:
    """The parallel body for a node of the portable graph.

    Args:
        inputs: of the node; 4, or 5 with a table of blocks.
        attributes: of the node.

    Raises:
        ValueError: there is no body for that number of inputs, or these attributes.
    """
    if inputs not in (4, 5):
        raise ValueError(f"{_NAME} has 4 or 5 inputs, not {inputs}.")
    return function_for(attributes=attributes, listed=inputs == 5)
