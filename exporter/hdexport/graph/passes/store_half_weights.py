"""Store a float32 graph's weights in the checkpoint's half precision."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from hdexport.graph.passes.upcast_to_float32 import upcast_uses
from hdexport.model.half_weights import VirtualWeights
from hdruntime.errors import ExportError, Setting

logger = logging.getLogger(__name__)


class StoreHalfWeights(ir.passes.InPlacePass):
    """Replace virtual weights by half-precision weights, which the graph casts to float32 as `UpcastToFloat32` does.

    Args:
        virtual: the weights that the graph was traced with.

    Raises:
        ExportError: the trace computed with values of virtual weights.
    """

    def __init__(self, virtual: VirtualWeights) -> None:
        self._virtual = virtual

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the weights."""
        stored = 0
        for value in list(model.graph.initializers.values()):
            if value.const_value is None or value.dtype is not ir.DataType.FLOAT:
                continue
            array = value.const_value.numpy()
            half = self._virtual.half_of(array)
            if half is None and np.isnan(array).any():
                raise ExportError(
                    f"The trace computed the constant {value.name} with weights in half precision.",
                    hint=("Build with ", Setting("fp32_weights", True), "."),
                )
            if half is None:
                continue
            value.const_value = ir.tensor(half, name=value.name)
            value.type = ir.TensorType(value.const_value.dtype)
            upcast_uses(value)
            stored += 1
        logger.info("%d weights are stored in half precision", stored)
        return ir.passes.PassResult(model, modified=bool(stored))
