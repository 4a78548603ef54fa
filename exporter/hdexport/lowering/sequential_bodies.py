"""Operators in sequential bodies that read states as projections leave them, with tokens before heads."""

from __future__ import annotations

__all__ = ["sequential_node"]

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import body_of
from hdplugins.attention.operator import BlockOrder

if TYPE_CHECKING:
    import onnx_ir


def sequential_node(model: onnx_ir.Model, node: onnx_ir.Node, tokens_first: Sequence[onnx_ir.Value]) -> onnx_ir.Node:
    """Return a node that computes the same as the given node from [batch, tokens, heads, head_dim], in no graph yet.

    Args:
        model: the model that receives the body.
        node: a node of an operator whose body has such a form.
        tokens_first: the states of the node, [batch, tokens, heads, head_dim]; the result has that shape, too.
    """
    import onnx_ir as ir

    body = body_of(node, BlockOrder.SEQUENTIAL)
    function = ir.serde.deserialize_function(body)
    model.functions[function.identifier()] = function
    inputs = [*tokens_first, *node.inputs[len(tokens_first) :]]
    return ir.node(body.name, inputs, attributes=node.attributes, domain=node.domain)
