"""Whether two graphs compute the same of the same weights, with any names of values."""

from __future__ import annotations

import hashlib
from collections import Counter

import onnx_ir as ir


def fingerprint(model: ir.Model) -> tuple[Counter[str], list[str]]:
    """A graph without the names of values: each node by all that it is computed from, down to the bytes of weights."""
    known = {value: f"input {value.name}" for value in model.graph.inputs}
    for value in model.graph.initializers.values():
        weight = value.const_value.numpy()
        known[value] = _digest(weight.dtype, weight.shape, weight.tobytes())
    nodes = _nodes_of(model.graph, known)
    return Counter(nodes), [f"{value.name} {value.shape} {known[value]}" for value in model.graph.outputs]


def _nodes_of(graph: ir.Graph, known: dict[ir.Value, str]) -> list[str]:
    nodes = []
    for node in graph:
        attributes = sorted(_attribute_of(attribute, known) for attribute in node.attributes.values())
        inputs = [None if value is None else known[value] for value in node.inputs]
        nodes.append(_digest(node.domain, node.op_type, attributes, inputs))
        known.update((value, f"{nodes[-1]}:{index}") for index, value in enumerate(node.outputs))
    return nodes


def _attribute_of(attribute: ir.Attr, known: dict[ir.Value, str]) -> str:
    if attribute.type is ir.AttributeType.GRAPH:
        graph = attribute.as_graph()
        return _digest(attribute.name, _nodes_of(graph, known), [known[value] for value in graph.outputs])
    if attribute.type is ir.AttributeType.TENSOR:
        return _digest(attribute.name, attribute.as_tensor().numpy().tolist())
    return _digest(attribute.name, attribute.value)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
