"""Remove BSHD/BHSD transposes by moving them through elementwise nodes.

Models rotate queries and keys by their positions, or normalize them, as [batch, heads, tokens, head_dim] (BHSD);
hdexport's operators take [batch, tokens, heads, head_dim] (BSHD), as linear layers give them.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from hdplugins.op_builder import OpBuilder

logger = logging.getLogger(__name__)

_HEADS, _TOKENS, _LAST = 1, 2, 3
_SWAP = (0, _TOKENS, _HEADS, _LAST)
"""Permutation that transposes BSHD to BHSD, and BHSD to BSHD."""

_ELEMENTWISE = (
    *("Abs", "Add", "Cast", "Clip", "Div", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid"),
    *("Sqrt", "Sub", "Tanh", "Where"),
)
_ALONG_ATTRIBUTE = ("Concat", "LayerNormalization", "RMSNormalization", "Split")
"""Operators along the axis of an attribute."""

_ALONG_INPUT = {"ReduceL2": 1, "ReduceMax": 1, "ReduceMean": 1, "ReduceSum": 1, "Slice": 3}
"""Operators along axes of an input -> the index of that input."""


class RemoveTransposes(ir.passes.InPlacePass):
    """Compute regions of a graph in BSHD that are computed in BHSD between transposes.

    1. A region is all BHSD values that movable nodes connect (`_is_movable`).
    2. A region is computed in BSHD if fewer nodes transpose then (`_Region.saved`), and stays as it is otherwise.
    3. A transpose of a region's value takes the permuted axes, or is removed where they are in order.
    4. A constant or a table of the region is stored in BSHD (`_to_bshd`).

    Attributes:
        saved: how many nodes fewer transpose.
    """

    def __init__(self) -> None:
        self.saved = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Move the transposes."""
        seen: set[ir.Value] = set()
        for node in list(model.graph):
            if _perm(node) == _SWAP and node.outputs[0].uses() and node.outputs[0] not in seen:
                region = _Region(model.graph, node.outputs[0])  # 1
                seen |= region.values.keys()
                if region.saved > 0:  # 2
                    region.rewrite()
                    self.saved += region.saved
        if self.saved:
            RemoveUnusedNodesPass()(model)
            logger.info("%d nodes fewer transpose heads and tokens", self.saved)
        return ir.passes.PassResult(model, modified=self.saved > 0)


class _Region:
    """BHSD values connected by nodes that can compute them in BSHD.

    Attributes:
        values: each value -> the nodes that need it in BHSD, with the index of the input.
        nodes: nodes that would change.
        transposes: nodes that transpose one of the values.
        saved: how many nodes fewer would transpose.
    """

    def __init__(self, graph: ir.Graph, first: ir.Value) -> None:
        self._graph = graph
        self.values: dict[ir.Value, list[tuple[ir.Node, int]]] = {first: []}
        self.nodes: dict[ir.Node, None] = {}
        self.transposes: dict[ir.Node, None] = {}
        self._pending = [first]
        while self._pending:
            value = self._pending.pop()
            self._add(value.producer())
            for reader, index in value.uses():
                if self._add(reader):
                    continue
                if _perm(reader) and reader.graph is graph and not reader.outputs[0].is_graph_output():
                    self.transposes[reader] = None
                else:
                    self.values[value].append((reader, index))
        swaps = sum(_perm(node) == _SWAP for node in self.transposes)
        self.saved = swaps + sum(self._saved(value) for value in self.values)

    def _add(self, node: ir.Node | None) -> bool:
        """Add a node that can change, and its values; returns whether it can."""
        if node is None or node.graph is not self._graph or not _is_movable(node):
            return False
        self.nodes[node] = None
        added = [value for value in (*_states(node), *node.outputs) if value not in self.values]
        self.values |= {value: [] for value in added}
        self._pending += added
        return True

    def _saved(self, value: ir.Value) -> int:
        """How many nodes fewer would transpose to give the value to its readers."""
        producer, is_kept = value.producer(), bool(self.values[value]) or value.is_graph_output()
        if producer in self.nodes:
            return -is_kept
        if _is_table(value):
            return 0
        if producer is not None and _perm(producer):
            return (_perm(producer) == _SWAP) - is_kept
        return -1

    def rewrite(self) -> None:
        """Compute the values in BSHD."""
        outside = [value for value in self.values if value.producer() not in self.nodes]
        bshd = {value: _to_bshd(value, self._graph) for value in outside}  # 4
        for value, readers in self.values.items():
            if readers and value not in bshd:
                bhsd = _transposed(value, _SWAP, self._graph, shape=value.shape)
                for reader, index in readers:
                    reader.replace_input_with(index, bhsd)
        for node in self.nodes:
            for index, value in enumerate(node.inputs):
                if value in bshd:
                    node.replace_input_with(index, bshd[value])
            for value in node.outputs:
                value.shape = _swapped(value.shape)
        for node in self.transposes:  # 3
            source = node.inputs[0]
            assert source is not None
            source = bshd.get(source, source)
            perm = tuple(_SWAP[axis] for axis in _perm(node))
            if perm == (0, 1, 2, 3):
                ir.convenience.replace_all_uses_with(node.outputs[0], source)
            else:
                node.replace_input_with(0, source)
                node.attributes["perm"] = ir.AttrInt64s("perm", perm)


def _is_movable(node: ir.Node) -> bool:
    """Whether a node that computes BHSD values can compute them in BSHD."""
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


def _states(node: ir.Node) -> list[ir.Value]:
    """The inputs of a movable node that have axes of heads and tokens."""
    inputs = node.inputs if node.op_type in _ELEMENTWISE or node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None and _rank(value) not in (0, 1)]


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    return None if value is None else ir.convenience.get_const_tensor(value)


def _perm(node: ir.Node) -> tuple[int, ...]:
    """The permutation of a node that transposes a value of four axes; empty for all other nodes."""
    if node.op_type != "Transpose" or node.domain:
        return ()
    perm = tuple(node.attributes.get_ints("perm", ()))
    return perm if len(perm) == len(_SWAP) else ()


def _is_table(value: ir.Value) -> bool:
    """Whether a value is in BSHD without a node that transposes it: it is constant, or lacks heads or tokens."""
    shape = value.shape
    lacks_both = shape is not None and len(shape) == len(_SWAP) and shape[_HEADS] == shape[_TOKENS] == 1
    return lacks_both or _constant(value) is not None or bool(_axes_of_table(value))


def _axes_of_table(value: ir.Value) -> list[int]:
    """Axes of size 1 that a node adds to a table, one of them the axis of heads or tokens; empty for other values."""
    node = value.producer()
    constant = _constant(node.inputs[1]) if node is not None and node.op_type == "Unsqueeze" else None
    axes = [] if constant is None else [axis % len(_SWAP) for axis in constant.numpy().tolist()]
    return axes if (_HEADS in axes) != (_TOKENS in axes) else []


def _to_bshd(value: ir.Value, graph: ir.Graph) -> ir.Value:
    """A BHSD value in BSHD, by a new node if necessary."""
    producer, constant, axes = value.producer(), _constant(value), _axes_of_table(value)
    if constant is not None:
        array = constant.numpy()
        array = array.reshape((1,) * (len(_SWAP) - array.ndim) + array.shape).transpose(_SWAP)
        stored = ir.Value(name=f"{value.name}.bshd", const_value=ir.tensor(array.copy()))
        stored.dtype, stored.shape = constant.dtype, ir.Shape(array.shape)
        graph.register_initializer(stored)
        return stored
    if value.shape is not None and value.shape[_HEADS] == value.shape[_TOKENS] == 1:
        return value
    if axes:
        assert producer is not None
        table = OpBuilder.after(producer).Unsqueeze(producer.inputs[0], sorted(_SWAP[axis] for axis in axes))
        table.dtype, table.shape = value.dtype, _swapped(value.shape)
        return table
    if producer is None or not _perm(producer):
        return _transposed(value, _SWAP, graph, shape=_swapped(value.shape))
    perm = tuple(_perm(producer)[axis] for axis in _SWAP)
    source = producer.inputs[0]
    assert source is not None
    return source if perm == (0, 1, 2, 3) else _transposed(source, perm, graph, shape=_swapped(value.shape))


def _transposed(value: ir.Value, perm: tuple[int, ...], graph: ir.Graph, *, shape: ir.Shape | None) -> ir.Value:
    producer = value.producer()
    op = OpBuilder.before(graph[0]) if producer is None else OpBuilder.after(producer)
    transposed = op.Transpose(value, perm=perm)
    transposed.dtype, transposed.shape = value.dtype, shape
    return transposed


def _swapped(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[axis] for axis in _SWAP])
