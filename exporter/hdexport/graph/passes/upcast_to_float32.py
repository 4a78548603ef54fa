"""Turn a half-precision graph into a graph that computes in float32 from the stored half-precision weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx_ir as ir

from hdplugins.op_builder import OpBuilder

logger = logging.getLogger(__name__)

_ROW_READERS = ("Gather", "Slice")
"""Operators that take rows of their first input."""

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class UpcastToFloat32(ir.passes.InPlacePass):
    """Compute in float32.

    1. Casts to a half type, half constants and half values become float32.
    2. A table, such as embeddings, of which nodes read rows: the rows are cast after they are read. The table is as
       large as all other weights of a small model, and a folded cast would be a float32 copy of it.
    3. Other weights are cast where they enter the graph. A runtime folds the cast when it loads the model, so that it
       costs nothing per run; the file with the weights is shared with the half-precision graph.
    4. Weights of which the graph casts all that it reads stay as they are.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for node in list(graph.all_nodes()):
            _upcast_attributes(node)  # 1
        half = [value for value in graph.initializers.values() if value.dtype in _HALF]
        weights = [weight for weight in half if not _is_upcast(weight)]  # 4
        upcast_rows = {node.outputs[0] for weight in half if weight not in weights for node in weight.consumers()}
        values = [output for node in graph.all_nodes() for output in node.outputs if output not in upcast_rows]
        for value in (*values, *(value for inner in graph.subgraphs() for value in inner.inputs)):
            if value.dtype in _HALF:
                # A new type object: copies of a model share their types, and setting `dtype` would change all copies.
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for weight in weights:
            upcast_uses(weight)
        logger.debug("%d weights are cast to float32", len(weights))
        return ir.passes.PassResult(model, modified=bool(weights))


def upcast_uses(weight: ir.Value) -> None:
    """Cast a half-precision weight, an initializer, to float32 for all nodes of its graph; rules 2 and 3."""
    graph, uses = weight.graph, tuple(weight.uses())
    assert graph is not None
    readers = [node for node, index in uses if index == 0 and _reads_rows(node, graph)]
    for reader in readers:
        _upcast_rows(reader, weight)  # 2
    whole = [(node, index) for node, index in uses if node not in readers]
    if whole:
        _upcast_weight(graph, weight, whole)  # 3


def _upcast_attributes(node: ir.Node) -> None:
    to = node.attributes.get("to")
    if node.op_type == "Cast" and to is not None and to.as_int() in _HALF:
        node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
            tensor = ir.tensor(attribute.as_tensor().numpy().astype("float32"))
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)


def _is_upcast(weight: ir.Value) -> bool:
    readers = [(node, index) for node, index in weight.uses() if not _casts_to_float32(node)]
    return all(
        index == 0 and _reads_rows(node, weight.graph) and all(map(_casts_to_float32, node.outputs[0].consumers()))
        for node, index in readers
    )


def _casts_to_float32(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.FLOAT


def _reads_rows(node: ir.Node, graph: ir.Graph | None) -> bool:
    return node.op_type in _ROW_READERS and node.graph is graph


def _upcast_rows(reader: ir.Node, weight: ir.Value) -> None:
    rows = reader.outputs[0]
    result = _float32_like(rows)
    ir.convenience.replace_all_uses_with(rows, result, replace_graph_outputs=True)
    rows.type = ir.TensorType(weight.dtype or ir.DataType.UNDEFINED)
    OpBuilder.after(reader).Cast(rows, to=ir.DataType.FLOAT, _outputs=[result])


def _upcast_weight(graph: ir.Graph, weight: ir.Value, uses: Sequence[tuple[ir.Node, int]]) -> None:
    cast = OpBuilder.before(graph[0]).Cast(weight, to=ir.DataType.FLOAT, _outputs=[_float32_like(weight)])
    for consumer, index in uses:
        consumer.replace_input_with(index, cast)


def _float32_like(value: ir.Value) -> ir.Value:
    name = f"{value.name}.float32"
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
