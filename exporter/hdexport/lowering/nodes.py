"""Read the nodes of hdexport's operators in a graph, and replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdplugins import ONNX_DOMAIN, OPERATORS, Operator
from hdplugins.attention.function_bodies import function_of_node
from hdplugins.attention.operator import BodyVariant
from hdplugins.op_builder import OpBuilder

if TYPE_CHECKING:
    import onnx_ir


def operator_nodes(model: onnx_ir.Model, name: str | None = None) -> list[onnx_ir.Node]:
    """The nodes of the domain ``hdexport``, or of one operator, in graph order; functions are not
    searched.
    """
    nodes = [node for node in model.graph if node.domain == ONNX_DOMAIN]
    return nodes if name is None else [node for node in nodes if operator_of(node).name == name]


def operator_of(node: onnx_ir.Node) -> Operator:
    """The operator of a node of the domain ``hdexport``.

    The type of the node is the operator's name, with a suffix where attributes decide the body: "Name_global16".
    """
    return OPERATORS[node.op_type.partition("_")[0]]


def attributes_of(node: onnx_ir.Node) -> dict[str, Any]:
    """A node's attributes as plain values, lists as tuples."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def body_of(node: onnx_ir.Node, variant: BodyVariant = BodyVariant.BATCHED) -> onnx_ir.Function:
    """Build the function of standard operators that computes a node and the other nodes of its name.

    The node's inputs have shapes.
    """
    operator = operator_of(node)
    grouped = operator.groups_heads and group_of(node) > 1
    return function_of_node(
        operator, inputs=len(node.inputs), attributes=attributes_of(node), grouped=grouped, variant=variant
    )


def add_function(model: onnx_ir.Model, function: onnx_ir.Function) -> onnx_ir.Function:
    """Give a model a function; it takes the place of a function of that name."""
    model.functions[function.identifier()] = function
    return function


def states_of(node: onnx_ir.Node) -> list[onnx_ir.Value]:
    """A node's states, [batch, tokens, heads, head_dim]."""
    states = node.inputs[: operator_of(node).states]
    return [state for state in states if state is not None]


def token_mask_of(node: onnx_ir.Node) -> onnx_ir.Value:
    """The input after a node's states, [batch, tokens]: the mask of real tokens, or the kind of each token."""
    mask = node.inputs[operator_of(node).states]
    assert mask is not None
    return mask


def heads_of(state: onnx_ir.Value | None) -> int:
    """The number of heads of a node's state, [batch, tokens, heads, head_dim]."""
    return int(shape_of(state)[2])


def shape_of(value: onnx_ir.Value | None) -> onnx_ir.Shape:
    """The shape of an input that a node must have, such as the state of an operator's node."""
    assert value is not None
    assert value.shape is not None
    return value.shape


def group_of(node: onnx_ir.Node) -> int:
    """Number of query heads that share a key head, from the shapes of a node's first and last state."""
    first, *_, last = states_of(node)
    return heads_of(first) // heads_of(last)


def is_causal(node: onnx_ir.Node) -> bool:
    """Whether attention is causal; operators without the attribute are bidirectional."""
    return bool(node.attributes.get_int("causal", 0))


def repeat_key_heads(op: OpBuilder, node: onnx_ir.Node) -> None:
    """Repeat each head of a node's keys and values for each head of queries that shares the head."""
    import onnx_ir as ir

    heads = heads_of(node.inputs[0])
    for index, state in enumerate(node.inputs[1:3], start=1):
        assert state is not None
        batch, tokens, kv_heads, head_dim = shape_of(state)
        if kv_heads == heads:
            continue
        repeated = repeated_heads(op, state, heads // int(kv_heads))
        repeated.dtype, repeated.shape = state.dtype, ir.Shape([batch, tokens, heads, head_dim])
        node.replace_input_with(index, repeated)


def repeated_heads(op: OpBuilder, state: onnx_ir.Value, group: int) -> onnx_ir.Value:
    """Repeat each head of keys or values, [batch, tokens, kv_heads, head_dim], `group` times."""
    _, _, kv_heads, head_dim = shape_of(state)
    copies = op.Expand(op.Unsqueeze(state, [3]), [1, 1, 1, group, 1])  # [batch, tokens, kv_heads, group, head_dim]
    return op.Reshape(copies, [0, 0, group * int(kv_heads), int(head_dim)])


def merge_heads(op: OpBuilder, state: onnx_ir.Value) -> onnx_ir.Value:
    """Reshape [batch, tokens, heads, head_dim] to [batch, tokens, hidden], which copies nothing."""
    return op.Reshape(state, [0, 0, -1])


def merged_states(op: OpBuilder, node: onnx_ir.Node) -> list[onnx_ir.Value]:
    """A node's states as [batch, tokens, hidden]."""
    return [merge_heads(op, state) for state in states_of(node)]


def same_node(op: OpBuilder, node: onnx_ir.Node, op_type: str | None = None) -> onnx_ir.Value:
    """The output of a new node with a node's inputs and attributes; `op_type` is its type, None for the node's."""
    return op.call(op_type or node.op_type, *node.inputs, _domain=node.domain, **node.attributes)


def replace_result(node: onnx_ir.Node, result: onnx_ir.Value) -> None:
    """Let what reads a node's output read another value, and remove the node."""
    import onnx_ir as ir

    replaced = node.outputs[0]
    result.dtype, result.shape, result.name = replaced.dtype, replaced.shape, replaced.name
    ir.convenience.replace_all_uses_with(replaced, result, replace_graph_outputs=True)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def replace_by_merged(op: OpBuilder, node: onnx_ir.Node, merged: onnx_ir.Value) -> None:
    """Replace a node's output, [batch, tokens, heads, head_dim], by a merged value, [batch, tokens, hidden]."""
    replace_result(node, op.Reshape(merged, [0, 0, heads_of(node.inputs[0]), -1]))
