"""Local attention with sides as function bodies of standard ONNX operators.

Queries are cut into blocks, and each block meets the span of keys that its windows reach: scores are [..., block,
span], and where a key stands in a span says its distance from each query of the block. So the biases by distance, and
what is beyond the windows, are one table for all blocks. Scores with sides are [..., tokens, sides], which is inherent.

The blocks come in two orders. In parallel they are one batch of products, which TensorRT fuses. In sequence a Scan
takes a head of a text, and a Scan in it a block after another: of scores, one block's are held.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.local_global_attention import OPERATOR
from hdplugins.operators.local_global_attention.onnx_parallel import parallel
from hdplugins.operators.local_global_attention.onnx_sequential import sequential
from hdplugins.operators.local_global_attention.sides import check_reaches
from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder

_NAME, _INPUTS = OPERATOR.name, OPERATOR.inputs
_LEAST_INPUTS = len(_INPUTS) - len(OPERATOR.optional_inputs)

_BLOCK_TOKENS = 64
"""Queries of a block. Larger ones copy fewer keys twice, and compute more scores that are masked; 128 was no faster."""


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
        inputs: of the node: 5, or 8 with sides.
        attributes: of the node; ``radius`` and ``side_tokens`` decide the body.
        order: of the blocks of queries.
        tokens_first: the states and the result are [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: another number of inputs, or attributes that define nothing.
    """
    if inputs not in (_LEAST_INPUTS, len(_INPUTS)):
        raise ValueError(f"{_NAME} has {_LEAST_INPUTS} or {len(_INPUTS)} inputs, not {inputs}.")
    radius, side_tokens = attributes["radius"], attributes["side_tokens"]
    has_sides = inputs == len(_INPUTS)
    check_reaches(radius=radius, side_tokens=side_tokens, side_reach=attributes["side_reach"], has_sides=has_sides)
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text = parallel(radius=radius, block=_BLOCK_TOKENS, side_tokens=side_tokens)
    else:
        text = sequential(radius=radius, block=_BLOCK_TOKENS, side_tokens=side_tokens, tokens_first=tokens_first)
    suffix = f"_radius{radius}" + f"_sides{side_tokens}" * has_sides + "_tokensfirst" * tokens_first
    nodes = nodes_of(text, inputs=_INPUTS[:inputs], attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix=suffix, inputs=inputs)
