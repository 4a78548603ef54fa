"""Write the zeros at padding, which the runtime guarantees, in the graph: a GPU does so before outputs are copied."""

from __future__ import annotations

import json
import logging

import onnx_ir as ir

from hdplugins.op_builder import OpBuilder
from hdruntime.backends.onnxruntime import ZEROED_OUTPUTS

logger = logging.getLogger(__name__)

_MAX_WIDTH = 4096
"""Largest number of values of a token. A wider output has logits over a vocabulary, 2 GB in a batch of 16384 tokens, of
which Where would make another copy."""


class ZeroPadding(ir.passes.InPlacePass):
    """Make outputs of tokens 0 at padding, where they may be NaN, and keep their names in the graph's metadata.

    1. A Where after the output's last node, which may be a Cast, selects the value or 0: no other value changes.
    2. Outputs stay as they are if they have no axis of tokens, are wider than `_MAX_WIDTH`, or the graph reads them, as
       a pooling does: users rarely request such an output, and ONNX Runtime would compute it anyway.

    Attributes:
        zeroed: names of the changed outputs.
    """

    def __init__(self) -> None:
        self.zeroed: list[str] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        # The name is that of `hdexport.model.graph_module`.
        mask = next((value for value in graph.inputs if value.name == "attention_mask"), None)
        for index, output in enumerate(graph.outputs):
            if mask is not None and _has_padding(output):  # 2
                graph.outputs[index] = _zeroed(output, mask)  # 1
                self.zeroed.append(str(graph.outputs[index].name))
        if self.zeroed:
            model.metadata_props[ZEROED_OUTPUTS] = json.dumps(self.zeroed)
            logger.info("padding is zeroed in %s", ", ".join(self.zeroed))
        return ir.passes.PassResult(model, modified=bool(self.zeroed))


def _zeroed(output: ir.Value, mask: ir.Value) -> ir.Value:
    producer = output.producer()
    assert producer is not None
    op, rank = OpBuilder.after(producer), len(output.shape or ())
    real = op.Cast(mask, to=ir.DataType.BOOL)
    if rank > 2:
        real = op.Unsqueeze(real, list(range(2, rank)))
    zeroed = op.Where(real, output, 0.0)
    zeroed.type, zeroed.shape = output.type, output.shape
    zeroed.name, output.name = output.name, f"{output.name}_padded"
    return zeroed


def _has_padding(output: ir.Value) -> bool:
    axes = list(output.shape or ())
    is_wide = any(isinstance(axis, int) and axis > _MAX_WIDTH for axis in axes[2:])
    return output.producer() is not None and axes[1:2] == ["tokens"] and not _is_read(output) and not is_wide


def _is_read(output: ir.Value) -> bool:
    cast = output.producer()
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    return bool(output.uses()) or (source is not None and len(source.uses()) > 1)
