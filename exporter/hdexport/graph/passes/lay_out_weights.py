"""Write weights that are views of others, such as folded transposes, as fast as others and in no more memory."""

from __future__ import annotations

import logging
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

logger = logging.getLogger(__name__)

_SLICE_BYTES = 2**20


class LayOutWeights(ir.passes.InPlacePass):
    """Make initializers that are not contiguous write themselves slice by slice.

    NumPy writes such an array value by value, ten times slower than it copies it. A copy of a whole large weight takes
    memory that nothing else in an export needs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the tensors of the initializers."""
        views = [
            value
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.Tensor) and not value.const_value.numpy().flags.c_contiguous
        ]
        for value in views:
            view = value.const_value
            value.const_value = _View(view.numpy(), dtype=view.dtype, name=view.name)
        logger.debug("%d weights are written slice by slice", len(views))
        return ir.passes.PassResult(model, modified=bool(views))


class _View(ir.Tensor):
    def tofile(self, file: BinaryIO) -> None:
        """Write the values to a file, one copy of `_SLICE_BYTES` at a time."""
        array = self.numpy()
        rows = max(1, _SLICE_BYTES // array[:1].nbytes)
        for start in range(0, len(array), rows):
            ir.Tensor(np.ascontiguousarray(array[start : start + rows]), dtype=self.dtype).tofile(file)
