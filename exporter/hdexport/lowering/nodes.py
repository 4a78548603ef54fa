"""The nodes of a graph that our operators own, and how others take their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdplugins import ONNX_DOMAIN, OPERATORS, Operator
from hdplugins.attention.operator import BodyVariant

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


def body_of(node: onnx_ir.Node, variant: BodyVariant = BodyVariant.BATCHED) -> onnx.FunctionProto:
    """The body, a function of standard operators, that computes a node and all others of its name; the node's inputs
    have shapes."""
    from hdplugins.attention.body_maker import function_of_node

    operator = operator_of(node)
    grouped = operator.groups_heads and group_of(node) > 1
    return function_of_node(
        operator, inputs=len(node.inputs), attributes=attributes_of(node), grouped=grouped, variant=variant
    )


def add_function(model: onnx_ir.Model, proto: onnx.FunctionProto) -> onnx_ir.Function:
    """Give a model a function, in the place of one of the same name."""
    import onnx_ir as ir

    function = ir.serde.deserialize_function(proto)
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
    """How many heads of queries share one of keys, by the shapes of a node's first state and its last one."""
    first, *_, last = states_of(node)
    return heads_of(first) // heads_of(last)


def is_causal(node: onnx_ir.Node) -> bool:
    """Whether a token sees only tokens up to itself; operators without the attribute see both sides."""
    return bool(node.attributes.get_int("causal", 0))


class Insertion:
    """Inserts nodes before a given one of the main graph."""

    def __init__(self, before: onnx_ir.Node) -> None:
        self._before = before

    def op(
        self, op_type: str, inputs: Sequence[onnx_ir.Value | None], attributes: Mapping[str, object] | None = None
    ) -> onnx_ir.Value:
        """The output of a new node."""
        import onnx_ir as ir

        return self.insert(ir.node(op_type, inputs, attributes=attributes))

    def insert(self, node: onnx_ir.Node) -> onnx_ir.Value:
        """The output of a node that is put in."""
        assert self._before.graph is not None
        self._before.graph.insert_before(self._before, node)
        return node.outputs[0]

    def integers(self, values: Sequence[int]) -> onnx_ir.Value:
        """A constant [len(values)], int64."""
        return self.op("Constant", [], {"value_ints": list(values)})

    def number(self, value: float) -> onnx_ir.Value:
        """A constant [], float32: a tensor, since tools that fold constants make a double of `value_float`."""
        import onnx_ir as ir

        return self.op("Constant", [], {"value": ir.tensor(value, ir.DataType.FLOAT)})


def repeat_key_heads(insertion: Insertion, node: onnx_ir.Node) -> None:
    """Give each head of a node's queries a head of keys and values of its own, where several share one."""
    import onnx_ir as ir

    heads = heads_of(node.inputs[0])
    for index, state in enumerate(node.inputs[1:3], start=1):
        assert state is not None
        batch, tokens, kv_heads, head_dim = shape_of(state)
        if kv_heads == heads:
            continue
        column = insertion.op("Unsqueeze", [state, insertion.integers([3])])
        copies = insertion.integers([1, 1, 1, heads // int(kv_heads), 1])
        repeated = insertion.op("Expand", [column, copies])  # [batch, tokens, kv_heads, heads / kv_heads, head_dim]
        each = insertion.op("Reshape", [repeated, insertion.integers([0, 0, heads, int(head_dim)])])
        each.dtype, each.shape = state.dtype, ir.Shape([batch, tokens, heads, head_dim])
        node.replace_input_with(index, each)


def merge_heads(insertion: Insertion, state: onnx_ir.Value) -> onnx_ir.Value:
    """[batch, tokens, heads, head_dim] as [batch, tokens, hidden], which copies nothing."""
    return insertion.op("Reshape", [state, insertion.integers([0, 0, -1])])


def swap_heads_and_tokens(insertion: Insertion, state: onnx_ir.Value) -> onnx_ir.Value:
    """[batch, tokens, heads, head_dim] as [batch, heads, tokens, head_dim], or the reverse."""
    return insertion.op("Transpose", [state], {"perm": (0, 2, 1, 3)})


def merged_states(insertion: Insertion, node: onnx_ir.Node) -> list[onnx_ir.Value]:
    """A node's states as [batch, tokens, hidden]."""
    return [merge_heads(insertion, state) for state in states_of(node)]


def replace_result(node: onnx_ir.Node, result: onnx_ir.Value) -> None:
    """Let what reads a node's result read another one, and remove the node."""
    import onnx_ir as ir

    replaced = node.outputs[0]
    result.dtype, result.shape, result.name = replaced.dtype, replaced.shape, replaced.name
    ir.convenience.replace_all_uses_with(replaced, result, replace_graph_outputs=True)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def replace_by_merged(insertion: Insertion, node: onnx_ir.Node, merged: onnx_ir.Value) -> None:
    """Let what reads a node's result, [batch, tokens, heads, head_dim], read a merged one, [batch, tokens, hidden]."""
    to_heads = insertion.integers([0, 0, heads_of(node.inputs[0]), -1])
    replace_result(node, insertion.op("Reshape", [merged, to_heads]))
