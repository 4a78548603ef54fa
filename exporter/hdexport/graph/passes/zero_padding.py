"""Zeros at padding, which the runtime promises, by nodes of the graph: a GPU writes them before answers are copied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hdruntime.backends.onnxruntime import ZEROED_OUTPUTS

if TYPE_CHECKING:
    import onnx_ir

_WIDEST = 4096
"""Numbers of a token. A wider output has logits over a vocabulary, 2 GB in a batch of 16384 tokens, of which Where
would make another copy."""


def zero_padding(model: onnx_ir.Model) -> list[str]:
    """Make outputs of tokens 0 at padding, NaN included, in place, after any cast, so that no other number changes;
    returns their names, which the graph's metadata keep for the runtime."""
    import onnx_ir as ir

    graph, names = model.graph, []
    # The name is that of `hdexport.model.graph_module`.
    mask = next((value for value in graph.inputs if value.name == "attention_mask"), None)
    for index, output in enumerate(graph.outputs):
        last, axes = output.producer(), list(output.shape or ())
        is_wide = any(isinstance(axis, int) and axis > _WIDEST for axis in axes[2:])
        if mask is None or last is None or axes[1:2] != ["tokens"] or _is_read(output) or is_wide:
            continue
        tape = ir.tape.Tape()
        real = tape.op("Cast", [mask], {"to": int(ir.DataType.BOOL)})
        if inner := list(range(2, len(axes))):
            real = tape.op("Unsqueeze", [real, tape.op("Constant", [], {"value_ints": inner})])
        zeroed = tape.op("Where", [real, output, tape.op("Constant", [], {"value": ir.tensor(0.0)})])
        zeroed.type, zeroed.shape = output.type, output.shape
        graph.insert_after(last, tape.nodes)
        names.append(str(output.name))
        zeroed.name, output.name, graph.outputs[index] = output.name, f"{output.name}_padded", zeroed
    if names:
        model.metadata_props[ZEROED_OUTPUTS] = json.dumps(names)
    return names


def _is_read(output: onnx_ir.Value) -> bool:
    """Whether the graph itself reads an output, as a pooling does: few ask for it beside what is made of it, and ONNX
    Runtime would compute it all the same."""
    cast = output.producer()
    narrow = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    return bool(output.uses()) or (narrow is not None and len(narrow.uses()) > 1)
