"""Write weights that are views of others, such as folded transpositions, as fast as others and in no more memory."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import onnx_ir as ir

_SLICE_BYTES = 2**20


def lay_out_weights(model: ir.Model) -> int:
    """Make initializers whose values are not in one piece write themselves slice by slice, in place; returns their
    number.

    NumPy writes such an array number by number, ten times slower than it copies it; and a copy of all of a large weight
    is memory that nothing else in an export needs.
    """
    views = [
        value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.Tensor) and not value.const_value.numpy().flags.c_contiguous
    ]
    for value in views:
        view = value.const_value
        value.const_value = _View(view.numpy(), dtype=view.dtype, name=view.name)
    return len(views)


class _View(ir.Tensor):
    def tofile(self, file: BinaryIO) -> None:
        """Write the values to a file, one copy of `_SLICE_BYTES` at a time."""
        array = self.numpy()
        rows = max(1, _SLICE_BYTES // array[:1].nbytes)
        for start in range(0, len(array), rows):
            ir.Tensor(np.ascontiguousarray(array[start : start + rows]), dtype=self.dtype).tofile(file)
