"""Put back the layers that were not traced because an earlier one differs only in its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hdexport.graph.left_out_layers import LayerResults
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

_RESULT = "layer_result."
"""Begins the names of layers' results, before the number of the call and the place among the results."""


def repeat_layers(model: onnx_ir.Model) -> int:
    """Replace each `REPEAT` by a copy of the layer that was traced, with weights of its own, in place; returns how
    many. A layer that does not fit the one that it repeats is an ExportError."""
    nodes = list(model.graph)
    marks = [(index, node) for index, node in enumerate(nodes) if node.domain == LAYERS_DOMAIN]
    starts = {_first(node): index for index, node in marks if node.op_type == INPUTS}
    ends = {_first(node): index for index, node in marks if node.op_type == OUTPUTS}
    repeats = [node for _, node in marks if node.op_type == REPEAT]
    calls = [node for _, node in marks if node.op_type != INPUTS]
    replaced: dict[onnx_ir.Value, onnx_ir.Value] = {}
    for repeat in repeats:
        start, end = starts[_first(repeat)], ends[_first(repeat)]
        replaced |= _copy_layer(repeat, nodes[start], nodes[start + 1 : end], nodes[end])
    for index in (*starts.values(), *ends.values()):
        replaced |= _replace(nodes[index], nodes[index].inputs[: len(nodes[index].outputs)])
    if repeats:
        _keep_names(model, calls, replaced)
    return len(repeats)


def _keep_names(
    model: onnx_ir.Model, calls: Sequence[onnx_ir.Node], replaced: Mapping[onnx_ir.Value, onnx_ir.Value]
) -> None:
    """Name the values that layers return, and keep the names in the graph's metadata.

    `calls` are the marks at the end of each call of a layer, in order; `replaced` has the replacement of a mark's
    output, which may be the output of another mark.
    """
    outputs = list(model.graph.outputs)
    names = []
    for number, call in enumerate(calls):
        values = list(call.outputs)
        while any(value in replaced for value in values):
            values = [replaced.get(value, value) for value in values]
        for index, value in enumerate(values):
            # A value that several layers return keeps the name that it has from the first of them.
            if value.producer() is not None and value not in outputs and not str(value.name).startswith(_RESULT):
                value.name = f"{_RESULT}{number}.{index}"
        names.append(tuple(str(value.name) for value in values))
    repeated = tuple(number for number, call in enumerate(calls) if call.op_type == REPEAT)
    if all(len(names[number]) == len(names[number - 1]) for number in repeated):
        LayerResults(names=tuple(names), repeated=repeated).write(model)


def _first(mark: onnx_ir.Node) -> int:
    return int(mark.attributes[FIRST].as_int())


def _copy_layer(
    repeat: onnx_ir.Node, start: onnx_ir.Node, body: Sequence[onnx_ir.Node], end: onnx_ir.Node
) -> dict[onnx_ir.Value, onnx_ir.Value]:
    """Put copies of the nodes that depend on a layer's inputs or weights in the place of `repeat`; the rest is shared.
    Returns the replacement of each output of `repeat`."""
    results, weights = end.inputs[: len(end.outputs)], end.inputs[len(end.outputs) :]
    replaced = (*start.outputs, *weights)
    if len(repeat.inputs) != len(replaced) or len(repeat.outputs) != len(results):
        raise ExportError(
            "A layer has other inputs, outputs or weights than the one that it repeats.\n"
            "Please report the model and the versions that `hdexport doctor` prints."
        )
    values = dict(zip(replaced, repeat.inputs, strict=True))
    for node in body:
        if any(value in values for value in node.inputs):
            copy = _copy(node, values)
            values.update(zip(node.outputs, copy.outputs, strict=True))
            repeat.graph.insert_before(repeat, copy)
    return _replace(repeat, [values.get(result, result) for result in results])


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


def _replace(mark: onnx_ir.Node, values: Sequence[onnx_ir.Value]) -> dict[onnx_ir.Value, onnx_ir.Value]:
    """Put values in the place of a mark's outputs, and remove the mark; returns output -> value."""
    outputs = tuple(mark.outputs)
    for output, value in zip(mark.outputs, values, strict=True):
        if output.is_graph_output():
            value.name = output.name
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    mark.graph.remove(mark, safe=True)
    return dict(zip(outputs, values, strict=True))
