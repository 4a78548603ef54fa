"""Layer normalizations that read and write float16, for kernels that compute in float32 internally.

A portable graph casts the states to float32, normalizes them, and casts them back, since many backends would normalize
float16 in float16. ONNX Runtime 1.31.1 on a GPU does not: its kernels of LayerNormalization and of
SkipLayerNormalization, which its optimizers make of a sum and a normalization, compute in float32. One kernel then
replaces five kernels, which take a sixth of the time of a batch of 8 x 4096 tokens of BERT-base (docs/gpu.md).
"""

from __future__ import annotations

import logging

import onnx_ir as ir

from hdplugins.op_builder import OpBuilder

logger = logging.getLogger(__name__)

_STATES = 0
"""Index of that input; scale and bias follow."""


class DowncastLayerNorms(ir.passes.InPlacePass):
    """Remove the casts around layer normalizations of float16 states.

    1. A normalization is changed if a Cast from float16 gives its states and all that reads its output are casts to
       float16. A normalization whose output is also read in float32 stays. So do graphs of bfloat16, whose kernels have
       not run on a GPU.
    2. Scale and bias are rounded to float16, as all weights of such a graph are.
    3. The output takes the name of the graph's output, or of the first cast's output, by which others know the value.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in list(model.graph.all_nodes()) if _is_between_casts(node)]  # 1
        for node in nodes:
            _downcast(node)
        if nodes:
            logger.info("%d layer normalizations read and write float16", len(nodes))
        return ir.passes.PassResult(model, modified=bool(nodes))


def _downcast(node: ir.Node) -> None:
    states, *weights = (value for value in node.inputs if value is not None)
    cast, op, normal = states.producer(), OpBuilder.before(node), node.outputs[0]
    assert cast is not None
    node.replace_input_with(_STATES, cast.inputs[0])
    for index, weight in enumerate(weights, start=_STATES + 1):  # 2
        rounded = op.Cast(weight, to=ir.DataType.FLOAT16)
        rounded.dtype, rounded.shape = ir.DataType.FLOAT16, weight.shape
        node.replace_input_with(index, rounded)
    normal.type = ir.TensorType(ir.DataType.FLOAT16)
    readers = [reader for reader, _ in normal.uses()]
    name = max((reader.outputs[0] for reader in readers), key=lambda output: output.is_graph_output()).name
    for reader in readers:
        ir.convenience.replace_all_uses_with(reader.outputs[0], normal, replace_graph_outputs=True)
        assert reader.graph is not None
        reader.graph.remove(reader, safe=True)
    normal.name = name  # 3


def _is_between_casts(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "LayerNormalization"):
        return False
    states, (normal, *statistics) = node.inputs[_STATES], node.outputs
    cast = None if states is None else states.producer()
    if cast is None or cast.op_type != "Cast" or cast.inputs[0] is None or cast.inputs[0].dtype != ir.DataType.FLOAT16:
        return False
    readers = [reader for reader, _ in normal.uses()]
    is_read_in_float32 = normal.is_graph_output() or any(
        reader.op_type != "Cast" or reader.attributes["to"].as_int() != ir.DataType.FLOAT16 for reader in readers
    )
    if not readers or is_read_in_float32 or any(value.uses() or value.is_graph_output() for value in statistics):
        return False
    return sum(reader.outputs[0].is_graph_output() for reader in readers) <= 1
