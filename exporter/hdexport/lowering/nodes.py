"""The nodes of a graph that our operators own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hdplugins import ONNX_DOMAIN, OPERATORS, Operator
from hdplugins.attention.operator import BlockOrder

if TYPE_CHECKING:
    import onnx
    import onnx_ir


def operator_nodes(model: onnx_ir.Model, name: str | None = None) -> list[onnx_ir.Node]:
    """The nodes of the domain ``hdexport``, in graph order.

    Args:
        model: the model to look into; bodies of functions are not searched.
        name: only nodes of this operator.
    """
    nodes = [node for node in model.graph if node.domain == ONNX_DOMAIN]
    return nodes if name is None else [node for node in nodes if operator_of(node).name == name]


def operator_of(node: onnx_ir.Node) -> Operator:
    """The operator of a node of the domain ``hdexport``.

    Its type is the operator's name, or, where attributes decide the body, begins with it: "Name_global16".
    """
    return OPERATORS[node.op_type.partition("_")[0]]


def attributes_of(node: onnx_ir.Node) -> dict[str, Any]:
    """A node's attributes as plain values, lists as tuples."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def body_of(node: onnx_ir.Node, order: BlockOrder = BlockOrder.PARALLEL) -> onnx.FunctionProto:
    """Return the function body of standard operators that computes a node, and the others of the body's name.

    Args:
        node: a node whose inputs have shapes.
        order: the order of the blocks.
    """
    from hdplugins.attention.body_maker import function_of_node

    operator = operator_of(node)
    grouped = operator.groups_heads and group_of(node) > 1
    return function_of_node(
        operator, inputs=len(node.inputs), attributes=attributes_of(node), grouped=grouped, order=order
    )


def sequential_node(model: onnx_ir.Model, node: onnx_ir.Node, tokens_first: Sequence[onnx_ir.Value]) -> onnx_ir.Node:
    """Return a node that computes the same as the given node from [batch, tokens, heads, head_dim], in no graph yet.

    Args:
        model: the model that receives the body.
        node: a node of an operator whose sequential body has such a form: it reads states as projections leave them.
        tokens_first: the states of the node, [batch, tokens, heads, head_dim]; the result has that shape, too.
    """
    import onnx_ir as ir

    body = body_of(node, BlockOrder.SEQUENTIAL)
    function = ir.serde.deserialize_function(body)
    model.functions[function.identifier()] = function
    inputs = [*tokens_first, *node.inputs[len(tokens_first) :]]
    return ir.node(body.name, inputs, attributes=node.attributes, domain=node.domain)


def token_mask_of(node: onnx_ir.Node) -> onnx_ir.Value:
    """The input after a node's states, [batch, tokens]: the mask of real tokens, or the kind of each token."""
    mask = node.inputs[operator_of(node).states]
    assert mask is not None
    return mask


def group_of(node: onnx_ir.Node) -> int:
    """How many heads of queries share one of keys, by the shapes of a node's first state and its last one."""
    first, last = node.inputs[0], node.inputs[operator_of(node).states - 1]
    assert first is not None
    assert first.shape is not None
    assert last is not None
    assert last.shape is not None
    return int(first.shape[1]) // int(last.shape[1])


def is_causal(node: onnx_ir.Node) -> bool:
    """Whether a token sees only tokens up to itself; nodes of old, without the attribute, are not causal."""
    return bool(node.attributes.get_int("causal", 0))
