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
    """The nodes of the domain ``hdexport``, or of one operator, in graph order; bodies of functions are
    not searched.
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
    """The body, a function of standard operators, that computes a node and all others of its name; the node's inputs
    have shapes."""
    from hdplugins.attention.body_maker import function_of_node

    operator = operator_of(node)
    grouped = operator.groups_heads and group_of(node) > 1
    return function_of_node(
        operator, inputs=len(node.inputs), attributes=attributes_of(node), grouped=grouped, order=order
    )


def sequential_node(model: onnx_ir.Model, node: onnx_ir.Node, tokens_first: Sequence[onnx_ir.Value]) -> onnx_ir.Node:
    """A node, in no graph yet, that computes the same as a given one from states as projections leave them.

    The states and the result are [batch, tokens, heads, head_dim]; the model receives the operator's sequential body.
    """
    import onnx_ir as ir

    body = body_of(node, BlockOrder.SEQUENTIAL)
    add_function(model, body)
    inputs = [*tokens_first, *node.inputs[len(tokens_first) :]]
    return ir.node(body.name, inputs, attributes=node.attributes, domain=node.domain)


def add_function(model: onnx_ir.Model, proto: onnx.FunctionProto) -> onnx_ir.Function:
    """Give a model a function, in the place of one of the same name."""
    import onnx_ir as ir

    function = ir.serde.deserialize_function(proto)
    model.functions[function.identifier()] = function
    return function


def token_mask_of(node: onnx_ir.Node) -> onnx_ir.Value:
    """The input after a node's states, [batch, tokens]: the mask of real tokens, or the kind of each token."""
    mask = node.inputs[operator_of(node).states]
    assert mask is not None
    return mask


def heads_of(state: onnx_ir.Value | None) -> int:
    """The number of heads of a node's state, [batch, heads, tokens, head_dim]."""
    return int(shape_of(state)[1])


def shape_of(value: onnx_ir.Value | None) -> onnx_ir.Shape:
    """The shape of an input that a node must have, such as the state of an operator's node."""
    assert value is not None
    assert value.shape is not None
    return value.shape


def group_of(node: onnx_ir.Node) -> int:
    """How many heads of queries share one of keys, by the shapes of a node's first state and its last one."""
    first, last = node.inputs[0], node.inputs[operator_of(node).states - 1]
    return heads_of(first) // heads_of(last)


def is_causal(node: onnx_ir.Node) -> bool:
    """Whether a token sees only tokens up to itself; nodes of old, without the attribute, are not causal."""
    return bool(node.attributes.get_int("causal", 0))
