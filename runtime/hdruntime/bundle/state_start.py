"""The memories before the first call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Fill, InputSpec


def state_at_start(spec: InputSpec, *, rows: int, memory: int) -> npt.NDArray[np.float32]:
    """A memory that nothing was put in yet.

    Args:
        spec: the input.
        rows: of the batch.
        memory: size of the axis ``memory``.

    Returns:
        float32 [rows, ...] of the shape in the manifest.
    """
    sizes = [memory if axis == "memory" else int(axis) for axis in spec.shape[1:]]
    return np.full((rows, *sizes), float(spec.default.fill is Fill.ONES), np.float32)
