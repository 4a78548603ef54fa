"""Changes to an ``openvino.Model`` that was read from a lowered graph, for verifications: in place.

They are made here and not to the ONNX graph: OpenVINO wants the weights in the directory of the graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdexport.attention.attention_type import DISCRETE_OUTPUT, DiscreteOutputs
from hdexport.graph.vocabulary_head import HEAD_INPUT, SAMPLED_TOKENS
from hdruntime.optional import require


def sampled(model: Any, output: str, vocab_size: int) -> bool:
    """As `hdexport.graph.vocabulary_head.sampled_graph` does of a graph."""
    opset = require("openvino.opset13")
    node = model.output(output).get_node()
    while node.get_type_name() in ("Result", "Add", "Convert"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul" or node.output(0).get_partial_shape()[2] != vocab_size:
        return False
    hidden_states = node.input_value(0)
    tokens = opset.parameter([-1], np.int64, name=SAMPLED_TOKENS)
    tokens.output(0).set_names({SAMPLED_TOKENS})
    gather = opset.gather(hidden_states, tokens, opset.constant(1))
    node.input(0).replace_source_output(gather.output(0))
    named = opset.convert(hidden_states, "f32")
    named.output(0).set_names({HEAD_INPUT})
    model.add_parameters([tokens])
    model.add_results([opset.result(named)])
    model.validate_nodes_and_infer_types()
    return True


def watch(model: Any, discrete_outputs: DiscreteOutputs) -> None:
    """Add discrete outputs as `DiscreteOutputs.watch` does; function bodies are inlined in the order of layers."""
    decided = (
        output
        for node in model.get_ordered_ops()
        for output in node.outputs()
        if any(discrete_outputs.inlined.fullmatch(name) for name in output.get_names())
    )
    for number, output in enumerate(list(decided)):
        added = model.add_outputs(output)[0]
        added.get_tensor().set_names({f"{DISCRETE_OUTPUT}{number}"})
