"""Layer normalisations that read and write float16, for kernels that compute in float32 inside.

A portable graph casts the states to float32, normalises them, and casts them back, for many backends would normalise
float16 in float16. ONNX Runtime 1.31.1 on a GPU does not: its kernels of LayerNormalization and of
SkipLayerNormalization, which its optimizers make of a sum and a normalisation, compute in float32. One kernel then
takes the place of five, which a batch of 8 x 4096 tokens of BERT-base spends a sixth of its time with (docs/gpu.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

_STATES = 0
"""Position of that input; scale and bias follow."""


def narrow_norms(model: onnx_ir.Model) -> int:
    """Take the casts around each layer normalisation of float16 states away, in place; returns how many were narrowed.

    Scale and bias are rounded to float16, as all weights of such a graph are. A normalisation whose result is also read
    in float32 stays, and so do graphs of another type: kernels of bfloat16 have not run on a GPU.
    """
    import onnx_ir as ir

    narrowed = [node for node in list(model.graph.all_nodes()) if _is_between_casts(node)]
    for node in narrowed:
        states, *weights = (value for value in node.inputs if value is not None)
        cast, graph, normal = states.producer(), node.graph, node.outputs[0]
        assert cast is not None
        assert graph is not None
        node.replace_input_with(_STATES, cast.inputs[0])
        for position, weight in enumerate(weights, start=_STATES + 1):
            rounded = ir.node("Cast", [weight], attributes={"to": int(ir.DataType.FLOAT16)})
            rounded.outputs[0].dtype, rounded.outputs[0].shape = ir.DataType.FLOAT16, weight.shape
            graph.insert_before(node, rounded)
            node.replace_input_with(position, rounded.outputs[0])
        normal.type = ir.TensorType(ir.DataType.FLOAT16)
        readers = [reader for reader, _ in normal.uses()]
        # Others know the value by the name of the graph's output, or of what the first reader gives.
        name = max((reader.outputs[0] for reader in readers), key=lambda read: read.is_graph_output()).name
        for reader in readers:
            ir.convenience.replace_all_uses_with(reader.outputs[0], normal, replace_graph_outputs=True)
            assert reader.graph is not None
            reader.graph.remove(reader, safe=True)
        normal.name = name
    return len(narrowed)


def _is_between_casts(node: onnx_ir.Node) -> bool:
    """Whether a node normalises states that were float16, and every reader casts the result to float16."""
    import onnx_ir as ir

    if (node.domain, node.op_type) != ("", "LayerNormalization"):
        return False
    states, (normal, *statistics) = node.inputs[_STATES], node.outputs
    cast = None if states is None else states.producer()
    if cast is None or cast.op_type != "Cast" or cast.inputs[0] is None or cast.inputs[0].dtype != ir.DataType.FLOAT16:
        return False
    readers = [reader for reader, _ in normal.uses()]
    is_read_wide = normal.is_graph_output() or any(
        reader.op_type != "Cast" or reader.attributes["to"].as_int() != ir.DataType.FLOAT16 for reader in readers
    )
    if not readers or is_read_wide or any(value.uses() or value.is_graph_output() for value in statistics):
        return False
    return sum(reader.outputs[0].is_graph_output() for reader in readers) <= 1
