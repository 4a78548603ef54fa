"""Turn a half-precision graph into the same graph computing in float32, its weights left as they are stored."""

from __future__ import annotations

__all__ = ["widen_to_float32"]

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir


def widen_to_float32(model: onnx_ir.Model) -> int:
    """Widen types in place: casts, constants and values become float32, and each weight is cast where it enters.

    ONNX Runtime folds the casts of weights when it loads the model, so they cost nothing per run, and the file with
    the weights can be shared with the half-precision graph.

    Returns:
        The number of weights that were widened; 0 for a graph that is float32 already.
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
    first = graph[0]
    for weight in weights:
        cast = ir.node("Cast", [weight], attributes={"to": int(ir.DataType.FLOAT)})
        wide_value = cast.outputs[0]
        wide_value.name = f"{weight.name}.float32"
        wide_value.dtype, wide_value.shape = ir.DataType.FLOAT, weight.shape
        for consumer, index in tuple(weight.uses()):
            consumer.replace_input_with(index, wide_value)
        cast.replace_input_with(0, weight)
        graph.insert_before(first, cast)
    return len(weights)
