"""Turn a half-precision graph into the same graph computing in float32, its weights left as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

_READERS_OF_ROWS = ("Gather", "Slice")
"""Operators that take rows of their first input."""


def widen_to_float32(model: onnx_ir.Model) -> int:
    """Widen types in place: casts, constants and values become float32, and each weight is cast where it enters.
    Returns the number of weights that were widened; 0 for a graph that is float32 already.

    The casts of weights are folded when the model is loaded, so they cost nothing per run, and the file with the
    weights can be shared with the half-precision graph. In tables such as embeddings, which are as large as all other
    weights of a small model, only the rows that are read are cast: a folded cast would be a copy of the table.
    """
    import onnx_ir as ir

    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    graph = model.graph
    for node in list(graph.all_nodes()):
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() in half:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype in half:
                wide = ir.tensor(attribute.as_tensor().numpy().astype("float32"))
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, wide)
    values = [output for node in graph.all_nodes() for output in node.outputs]
    for value in (*values, *(value for inner in graph.subgraphs() for value in inner.inputs)):
        if value.dtype in half:
            # A type of its own: copies of a model share their types, and setting `dtype` would change them all.
            value.type = ir.TensorType(ir.DataType.FLOAT)
    weights = [value for value in graph.initializers.values() if value.dtype in half]
    for weight in weights:
        uses = tuple(weight.uses())
        rows = [node for node, index in uses if index == 0 and node.op_type in _READERS_OF_ROWS and node.graph is graph]
        for reader in rows:
            _widen_rows(reader, weight)
        whole = [(node, index) for node, index in uses if node not in rows]
        if whole:
            _widen_weight(graph, weight, whole)
    return len(weights)


def _widen_rows(reader: onnx_ir.Node, weight: onnx_ir.Value) -> None:
    """Cast the weight that a node of the main graph reads."""
    import onnx_ir as ir

    read = reader.outputs[0]
    cast = _cast(read)
    read.type = ir.TensorType(weight.dtype or ir.DataType.UNDEFINED)
    ir.convenience.replace_all_uses_with(read, cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, read)
    assert reader.graph is not None
    reader.graph.insert_after(reader, cast)


def _widen_weight(graph: onnx_ir.Graph, weight: onnx_ir.Value, uses: Sequence[tuple[onnx_ir.Node, int]]) -> None:
    cast = _cast(weight)
    for consumer, index in uses:
        consumer.replace_input_with(index, cast.outputs[0])
    graph.insert_before(graph[0], cast)


def _cast(value: onnx_ir.Value) -> onnx_ir.Node:
    """A node that casts a value to float32, not in any graph yet."""
    import onnx_ir as ir

    cast = ir.node("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)})
    wide = cast.outputs[0]
    wide.name, wide.dtype, wide.shape = f"{value.name}.float32", ir.DataType.FLOAT, value.shape
    return cast
