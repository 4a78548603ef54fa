"""Cut a graph into parts that run one after another, for machines whose memory does not hold all weights at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, ShapeInferencePass


class Part(NamedTuple):
    """Consecutive nodes of a graph, as a graph of their own.

    Attributes:
        model: the nodes with their weights, and the functions that they call. Inputs are those of the whole graph, and
            values that earlier parts computed; outputs are what later parts read, and outputs of the whole graph.
        ended: names of values of earlier parts that no later part reads.
    """

    model: ir.Model
    ended: frozenset[str]


def cut(model: ir.Model, max_weights: int) -> list[Part]:
    """Cut a graph into parts, in the order in which they run.

    1. What is computed from weights alone, such as an upcast, belongs to each part that reads it.
    2. A part ends where the fewest values are live, among the places where it has half of the weights that it may have
       or more: between two layers.
    3. A node whose own weights are too many is not cut.

    Args:
        model: the graph. In place, unused nodes are removed, and missing types and shapes of its values are inferred.
        max_weights: largest number of weights of a part.
    """
    RemoveUnusedNodesPass()(model)
    ShapeInferencePass()(model)
    nodes = _Nodes(model.graph)
    bounds = [0]
    while bounds[-1] < len(nodes.computed):
        bounds.append(nodes.end_of_part(bounds[-1], max_weights))
    return [nodes.part(model, begin, end) for begin, end in itertools.pairwise(bounds)]


class _Nodes:
    """The nodes of a graph that compute from its inputs, and where their results are read."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.computed: list[ir.Node] = []
        self._weights_of_node: list[frozenset[ir.Value]] = []
        self._producer: dict[ir.Value, int] = {}
        self._last_reader: dict[ir.Value, int] = {}
        weights = {value: frozenset([value]) for value in graph.initializers.values()}
        """Value that is computed from weights alone -> the weights."""
        for node in graph:
            read = list(_read_by(node))
            of_node = frozenset[ir.Value]().union(*(weights.get(value, ()) for value in read))
            if all(value in weights for value in read) and (read or node.op_type == "Constant"):  # 1
                weights |= dict.fromkeys(node.outputs, of_node)
                continue
            place = len(self.computed)
            self.computed.append(node)
            self._weights_of_node.append(of_node)
            self._last_reader |= dict.fromkeys((value for value in read if value in self._producer), place)
            self._producer |= dict.fromkeys(node.outputs, place)
        self._last_reader |= {value: len(self.computed) for value in graph.outputs if value in self._producer}
        self._live = [0.0] * (len(self.computed) + 1)
        """Number of nodes before a place -> number of values that are computed before it and read after it."""
        for value, last in self._last_reader.items():
            for place in range(self._producer[value] + 1, last + 1):
                self._live[place] += 1 if _is_numpy(value.dtype) else math.inf

    def end_of_part(self, begin: int, max_weights: int) -> int:
        """The number of nodes before the end of the part that begins after `begin` nodes."""
        weights: set[ir.Value] = set()
        places: list[tuple[int, int]] = []
        for place, of_node in enumerate(self._weights_of_node[begin:], begin + 1):
            weights |= of_node
            count = sum(value.const_value.size for value in weights if value.const_value is not None)
            if count > max_weights and any(fewer for _, fewer in places):
                break
            if self._live[place] < math.inf:
                places.append((place, count))
        else:
            return len(self.computed)
        # Of a node with too many weights only the first place after it is there.
        large = [place for place, count in places if 2 * count >= max_weights] or [places[-1][0]]
        return min(large, key=lambda place: (self._live[place], -place))  # 2

    def part(self, model: ir.Model, begin: int, end: int) -> Part:
        """The part of the nodes from `begin` up to `end`."""
        nodes = self.computed[begin:end]
        read = {value for node in nodes for value in _read_by(node)}
        inputs = [value for value in self._graph.inputs if value in read]
        inputs += [value for value, place in self._producer.items() if place < begin and value in read]
        outputs = [value for node in nodes for value in node.outputs if self._last_reader.get(value, 0) >= end]
        if end == len(self.computed):
            outputs += [value for value in self._graph.outputs if value not in self._producer]
        graph = ir.convenience.extract(self._graph, inputs, outputs)
        part = ir.Model(graph, ir_version=model.ir_version, functions=model.functions.values())
        RemoveUnusedFunctionsPass()(part)
        ended = [value for value in self._producer if begin <= self._last_reader.get(value, -1) < end]
        return Part(part, frozenset(str(value.name) for value in ended if self._producer[value] < begin))


def _is_numpy(dtype: ir.DataType | None) -> bool:
    """Whether arrays of NumPy's own types hold a value of that type, as between two parts; bfloat16 is not NumPy's."""
    return dtype is not None and dtype.numpy().isbuiltin == 1


def _read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of a node, and the outputs and all nodes' inputs of its subgraphs."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        graphs: Sequence[ir.Graph] = ()
        if attribute.type is ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type is ir.AttributeType.GRAPHS:
            graphs = attribute.as_graphs()
        for graph in graphs:
            yield from graph.outputs
            for inner in graph:
                yield from _read_by(inner)
