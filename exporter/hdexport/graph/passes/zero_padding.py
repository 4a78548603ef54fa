"""Zeros at padding, which the runtime promises, by nodes of the graph: a GPU writes them before answers are copied.

ONNX Runtime computes all outputs of a graph, also those that nobody asks for, and its kernel of Where writes to new
memory.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from hdruntime.backends.onnxruntime import ZEROED_OUTPUTS

if TYPE_CHECKING:
    import onnx_ir

_MASK = "attention_mask"
"""The input that tells real tokens from padding; `hdexport.model.graph_module` names it."""

_WIDEST = 4096
"""Numbers of a token. A wider output has logits over a vocabulary, 2 GB in a batch of 16384 tokens, which a GPU may not
have memory for twice."""


def zero_padding(model: onnx_ir.Model) -> list[str]:
    """Make outputs of tokens 0 at padding, NaN included, in place; returns their names, which the graph's metadata keep
    for the runtime.

    Outputs are float32, also of a graph in half precision: its last cast stays as it is, and so does every number.
    """
    import onnx_ir as ir

    graph = model.graph
    mask = next((value for value in graph.inputs if value.name == _MASK), None)
    names = []
    for index, output in enumerate(graph.outputs):
        last = output.producer()
        if mask is None or last is None or not _is_zeroed(output):
            continue
        tape = ir.tape.Tape()
        real = tape.op("Cast", [mask], {"to": int(ir.DataType.BOOL)})
        if inner := list(range(2, len(output.shape or ()))):
            real = tape.op("Unsqueeze", [real, tape.op("Constant", [], {"value_ints": inner})])
        zeroed = tape.op("Where", [real, output, tape.op("Constant", [], {"value_float": 0.0})])
        zeroed.type, zeroed.shape = output.type, output.shape
        graph.insert_after(last, tape.nodes)
        names.append(str(output.name))
        zeroed.name, output.name = output.name, f"{output.name}_padded"
        graph.outputs[index] = zeroed
    if names:
        model.metadata_props[ZEROED_OUTPUTS] = json.dumps(names)
    return names


def _is_zeroed(output: onnx_ir.Value) -> bool:
    """Whether an output has an axis of tokens, and the zeros are worth their time and memory.

    Few ask for an output that the graph itself reads, as a pooling does, beside what is made of it.
    """
    cast, axes = output.producer(), list(output.shape or ())
    narrow = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    is_read = output.uses() or (narrow is not None and len(narrow.uses()) > 1)
    width = math.prod(axis for axis in axes[2:] if isinstance(axis, int))
    return axes[1:2] == ["tokens"] and not is_read and width <= _WIDEST
