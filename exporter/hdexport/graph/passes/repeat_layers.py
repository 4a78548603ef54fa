"""Put back the layers that were not traced because an earlier one differs only in its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

LAYERS_DOMAIN = "hdexport.layers"
"""Domain of the marks that tracing leaves in a graph; this pass removes all marks."""

INPUTS = "Inputs"
"""Inputs of a layer that is traced: as many outputs as inputs."""

OUTPUTS = "Outputs"
"""The layer's results, and after them its weights: as many outputs as results."""

REPEAT = "Repeat"
"""A layer that is not traced: from its inputs, followed by its weights, to its outputs."""

FIRST = "first"
"""Attribute of all three: the number of the layer that is traced."""


def repeat_layers(model: onnx_ir.Model) -> int:
    """Replace each `REPEAT` by a copy of the layer that was traced, with weights of its own, in place; returns how
    many. A layer that does not fit the one that it repeats is an ExportError."""
    nodes = list(model.graph)
    marks = [(index, node) for index, node in enumerate(nodes) if node.domain == LAYERS_DOMAIN]
    starts = {_first(node): index for index, node in marks if node.op_type == INPUTS}
    ends = {_first(node): index for index, node in marks if node.op_type == OUTPUTS}
    repeats = [node for _, node in marks if node.op_type == REPEAT]
    for repeat in repeats:
        start, end = starts[_first(repeat)], ends[_first(repeat)]
        _copy_layer(repeat, nodes[start], nodes[start + 1 : end], nodes[end])
    for index in (*starts.values(), *ends.values()):
        _replace(nodes[index], nodes[index].inputs[: len(nodes[index].outputs)])
    return len(repeats)


def _first(mark: onnx_ir.Node) -> int:
    return int(mark.attributes[FIRST].as_int())


def _copy_layer(repeat: onnx_ir.Node, start: onnx_ir.Node, body: Sequence[onnx_ir.Node], end: onnx_ir.Node) -> None:
    """Replace `repeat` by copies of the nodes that depend on a layer's inputs or weights, and share the other nodes."""
    results, weights = end.inputs[: len(end.outputs)], end.inputs[len(end.outputs) :]
    replaced = (*start.outputs, *weights)
    if len(repeat.inputs) != len(replaced) or len(repeat.outputs) != len(results):
        raise ExportError(
            "A layer has other inputs, outputs or weights than the one that it repeats.",
            hint="Please report the model and the versions that `hdexport doctor` prints.",
        )
    values = dict(zip(replaced, repeat.inputs, strict=True))
    for node in body:
        if any(value in values for value in node.inputs):
            copy = _copy(node, values)
            values.update(zip(node.outputs, copy.outputs, strict=True))
            repeat.graph.insert_before(repeat, copy)
    _replace(repeat, [values.get(result, result) for result in results])


def _copy(node: onnx_ir.Node, values: dict[onnx_ir.Value, onnx_ir.Value]) -> onnx_ir.Node:
    import onnx_ir as ir

    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else values.get(value, value) for value in node.inputs],
        node.attributes,
        overload=node.overload,
        version=node.version,
        num_outputs=len(node.outputs),
    )
    for value, original in zip(copy.outputs, node.outputs, strict=True):
        value.type, value.shape = original.type, original.shape
    return copy


def _replace(mark: onnx_ir.Node, values: Sequence[onnx_ir.Value]) -> None:
    """Put values in the place of a mark's outputs, and remove the mark."""
    for output, value in zip(mark.outputs, values, strict=True):
        if output.is_graph_output():
            value.name = output.name
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    mark.graph.remove(mark, safe=True)
