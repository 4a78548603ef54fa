"""Nodes between two swaps of heads and tokens compute tokens first, so that the swaps are gone.

Models turn queries and keys by their positions, or normalise them, as [batch, heads, tokens, head_dim]; our operators
take [batch, tokens, heads, head_dim], as projections give them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

_HEADS, _TOKENS, _LAST = 1, 2, 3
_SWAP = (0, _TOKENS, _HEADS, _LAST)

_ELEMENTWISE = (
    *("Abs", "Add", "Cast", "Clip", "Div", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid"),
    *("Sqrt", "Sub", "Tanh", "Where"),
)
_ALONG_ATTRIBUTE = ("Concat", "LayerNormalization", "RMSNormalization", "Split")
"""Operators along the axis of an attribute."""

_ALONG_INPUT = {"ReduceL2": 1, "ReduceMax": 1, "ReduceMean": 1, "ReduceSum": 1, "Slice": 3}
"""Operators along axes of an input -> the place of that input."""


def tokens_first(model: onnx_ir.Model) -> int:
    """Move swaps of heads and tokens until they meet others, in place; returns how many nodes fewer transpose.

    What lies between swaps changes as a whole, where that leaves fewer of them, and else stays as it is.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    seen: set[onnx_ir.Value] = set()
    saved = 0
    for node in list(model.graph):
        if _perm(node) == _SWAP and node.outputs[0].uses() and node.outputs[0] not in seen:
            region = _Region(model.graph, node.outputs[0])
            seen |= region.values.keys()
            if region.saved > 0:
                region.rewrite()
                saved += region.saved
    if saved:
        RemoveUnusedNodesPass()(model)
    return saved


class _Region:
    """Values that have heads first, connected by nodes that can compute them tokens first.

    Attributes:
        values: each value -> the nodes, and the places of their inputs, that need it as it is.
        nodes: all that would change.
        turned: nodes that transpose one of the values.
        saved: how many nodes fewer would transpose.
    """

    def __init__(self, graph: onnx_ir.Graph, first: onnx_ir.Value) -> None:
        self._graph = graph
        self.values: dict[onnx_ir.Value, list[tuple[onnx_ir.Node, int]]] = {first: []}
        self.nodes: dict[onnx_ir.Node, None] = {}
        self.turned: dict[onnx_ir.Node, None] = {}
        self._new = [first]
        while self._new:
            value = self._new.pop()
            self._add(value.producer())
            for reader, place in value.uses():
                if self._add(reader):
                    continue
                if _perm(reader) and reader.graph is graph and not reader.outputs[0].is_graph_output():
                    self.turned[reader] = None
                else:
                    self.values[value].append((reader, place))
        swaps = sum(_perm(node) == _SWAP for node in self.turned)
        self.saved = swaps + sum(self._saved(value) for value in self.values)

    def _add(self, node: onnx_ir.Node | None) -> bool:
        """Whether a node can change; it and its values are added then."""
        if node is None or node.graph is not self._graph or not _is_movable(node):
            return False
        self.nodes[node] = None
        new = [value for value in (*_states(node), *node.outputs) if value not in self.values]
        self.values |= {value: [] for value in new}
        self._new += new
        return True

    def _saved(self, value: onnx_ir.Value) -> int:
        """How many nodes fewer would transpose to give the value as it is read."""
        producer, is_kept = value.producer(), bool(self.values[value]) or value.is_graph_output()
        if producer in self.nodes:
            return -is_kept
        if _is_table(value):
            return 0
        if producer is not None and _perm(producer):
            return (_perm(producer) == _SWAP) - is_kept
        return -1

    def rewrite(self) -> None:
        """Compute the values tokens first."""
        import onnx_ir as ir

        outside = [value for value in self.values if value.producer() not in self.nodes]
        now = {value: _tokens_first(value, self._graph) for value in outside}
        for value, kept in self.values.items():
            if kept and value not in now:
                heads_first = _transposed(value, _SWAP, self._graph, shape=value.shape)
                for reader, place in kept:
                    reader.replace_input_with(place, heads_first)
        for node in self.nodes:
            for place, value in enumerate(node.inputs):
                if value in now:
                    node.replace_input_with(place, now[value])
            for value in node.outputs:
                value.shape = _swapped(value.shape)
        for node in self.turned:
            given = node.inputs[0]
            assert given is not None
            given = now.get(given, given)
            perm = tuple(_SWAP[axis] for axis in _perm(node))
            if perm == (0, 1, 2, 3):
                ir.convenience.replace_all_uses_with(node.outputs[0], given)
            else:
                node.replace_input_with(0, given)
                node.attributes["perm"] = ir.AttrInt64s("perm", perm)


def _is_movable(node: onnx_ir.Node) -> bool:
    """Whether a node that computes values with heads first can compute them tokens first."""
    if node.domain or any(_rank(value) != len(_SWAP) or value.is_graph_output() for value in node.outputs):
        return False
    if node.op_type in _ELEMENTWISE:
        # An input without an axis of heads or tokens stays as it is.
        return all(_rank(value) == len(_SWAP) or _constant(value) is not None for value in _states(node))
    if node.op_type in _ALONG_ATTRIBUTE:
        axes = [node.attributes.get_int("axis", -1)]
    elif _ALONG_INPUT.get(node.op_type, len(node.inputs)) < len(node.inputs):
        constant = _constant(node.inputs[_ALONG_INPUT[node.op_type]])
        axes = [] if constant is None else constant.numpy().tolist()
    else:
        return False
    return len(axes) == 1 and axes[0] in (_LAST, -1) and all(_rank(value) == len(_SWAP) for value in _states(node))


def _states(node: onnx_ir.Node) -> list[onnx_ir.Value]:
    """The inputs of a node that can change that have axes of heads and tokens."""
    inputs = node.inputs if node.op_type in _ELEMENTWISE or node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None and _rank(value) not in (0, 1)]


def _rank(value: onnx_ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _constant(value: onnx_ir.Value | None) -> onnx_ir.TensorProtocol | None:
    import onnx_ir as ir

    return None if value is None else ir.convenience.get_const_tensor(value)


def _perm(node: onnx_ir.Node) -> tuple[int, ...]:
    """The order of the axes that a node gives to a value of four; empty for all other nodes."""
    if node.op_type != "Transpose" or node.domain:
        return ()
    perm = tuple(node.attributes.get_ints("perm", ()))
    return perm if len(perm) == len(_SWAP) else ()


def _is_table(value: onnx_ir.Value) -> bool:
    """Whether a value is laid out tokens first without a node that transposes it: it lacks heads, or tokens."""
    shape = value.shape
    lacks_both = shape is not None and len(shape) == len(_SWAP) and shape[_HEADS] == shape[_TOKENS] == 1
    return lacks_both or _constant(value) is not None or bool(_axes_of_table(value))


def _axes_of_table(value: onnx_ir.Value) -> list[int]:
    """Axes of size 1 that a node adds to a table, one of them the axis of heads or tokens; empty for other values."""
    node = value.producer()
    constant = _constant(node.inputs[1]) if node is not None and node.op_type == "Unsqueeze" else None
    axes = [] if constant is None else [axis % len(_SWAP) for axis in constant.numpy().tolist()]
    return axes if (_HEADS in axes) != (_TOKENS in axes) else []


def _tokens_first(value: onnx_ir.Value, graph: onnx_ir.Graph) -> onnx_ir.Value:
    """A value with heads first, tokens first, by a new node if need be."""
    import onnx_ir as ir

    producer, constant, axes = value.producer(), _constant(value), _axes_of_table(value)
    if constant is not None:
        array = constant.numpy()
        array = array.reshape((1,) * (len(_SWAP) - array.ndim) + array.shape).transpose(_SWAP)
        made = ir.Value(name=f"{value.name}.tokens_first", const_value=ir.tensor(array.copy()))
        made.dtype, made.shape = constant.dtype, ir.Shape(array.shape)
        graph.register_initializer(made)
        return made
    if value.shape is not None and value.shape[_HEADS] == value.shape[_TOKENS] == 1:
        return value
    if axes:
        assert producer is not None
        places = ir.node("Constant", [], {"value_ints": sorted(_SWAP[axis] for axis in axes)})
        table = ir.node("Unsqueeze", [producer.inputs[0], places.outputs[0]])
        table.outputs[0].dtype, table.outputs[0].shape = value.dtype, _swapped(value.shape)
        graph.insert_after(producer, [places, table])
        return table.outputs[0]
    if producer is None or not _perm(producer):
        return _transposed(value, _SWAP, graph, shape=_swapped(value.shape))
    perm = tuple(_perm(producer)[axis] for axis in _SWAP)
    given = producer.inputs[0]
    assert given is not None
    return given if perm == (0, 1, 2, 3) else _transposed(given, perm, graph, shape=_swapped(value.shape))


def _transposed(
    value: onnx_ir.Value, perm: tuple[int, ...], graph: onnx_ir.Graph, *, shape: onnx_ir.Shape | None
) -> onnx_ir.Value:
    import onnx_ir as ir

    node, producer = ir.node("Transpose", [value], {"perm": perm}), value.producer()
    node.outputs[0].dtype, node.outputs[0].shape = value.dtype, shape
    if producer is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(producer, node)
    return node.outputs[0]


def _swapped(shape: onnx_ir.Shape | None) -> onnx_ir.Shape | None:
    import onnx_ir as ir

    return None if shape is None else ir.Shape([shape[axis] for axis in _SWAP])
