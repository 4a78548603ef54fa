"""FAVOR+ as function bodies of standard ONNX operators, with time and memory linear in tokens.

In parallel, all heads of all texts are one batch of products, which TensorRT fuses; their features are in memory at
once, [batch, heads, tokens, features]. Sequentially, as a CPU likes it, a Scan takes one head of one text after the
other, and in it one chunk of tokens after the other: keys and values are summed up with a running maximum, then the
queries read the sums. All of it is float32 whatever the inputs' type.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.favor_attention import OPERATOR
from hdplugins.operators.favor_attention.features import check_attributes
from hdplugins.operators.favor_attention.onnx_parallel import parallel
from hdplugins.operators.favor_attention.onnx_sequential import sequential
from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder

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
        inputs: of the node; 5.
        attributes: of the node; ``compat`` decides the body, which reads the others itself.
        order: of heads and chunks.
        tokens_first: the function takes and returns [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: another number of inputs, or attributes that define nothing.
    """
    if inputs != len(_INPUTS):
        raise ValueError(f"{_NAME} has {len(_INPUTS)} inputs, not {inputs}.")
    check_attributes(**{name: attributes[name] for name in ("features", "epsilon", "compat")})
    compat = bool(attributes["compat"])
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text = parallel(compat=compat)
    else:
        text = sequential(compat=compat, tokens_first=tokens_first)
    nodes = nodes_of(text, inputs=_INPUTS, attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix="_compat" * compat + "_tokensfirst" * tokens_first, inputs=inputs)
