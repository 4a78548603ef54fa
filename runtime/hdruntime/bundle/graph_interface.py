"""Inputs and outputs of graphs: whether they are the manifest's, and carried states before the first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Fill, GraphFile, InputSpec, TensorSpec
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError

Found = Mapping[str, tuple[str, Sequence[object]]]
"""Name -> NumPy's name of the type, and axes of an input or output: sizes, or any other object for dynamic axes."""


def check_interface(bundle: Bundle, graph: GraphFile, *, inputs: Found, outputs: Found) -> None:
    """Reject a graph whose names, types or axes are not the manifest's; the error has both."""
    for kind, listed, found in (
        ("inputs", bundle.manifest.inputs, inputs),
        ("outputs", bundle.manifest.outputs, outputs),
    ):
        if {spec.name for spec in listed} != set(found) or not all(_agree(spec, *found[spec.name]) for spec in listed):
            here = ", ".join(_shown(name, *found[name]) for name in sorted(found))
            there = ", ".join(
                _shown(spec.name, spec.dtype, spec.shape) for spec in sorted(listed, key=attrgetter("name"))
            )
            raise BundleCorruptError(
                f"The {kind} of {graph.file} are {here or 'none'}, but the manifest of {bundle.path} lists {there}.",
                hint="Rebuild the bundle.",
            )


def state_at_start(spec: InputSpec, *, rows: int, memory: int) -> FloatArray:
    """A carried state before the first call, float32 [rows, ...] of the input's shape; `memory` is the axis' size."""
    sizes = [memory if axis == "memory" else int(axis) for axis in spec.shape[1:]]
    return np.full((rows, *sizes), float(spec.default.fill is Fill.ONES), np.float32)


def _agree(spec: TensorSpec, dtype: str, axes: Sequence[object]) -> bool:
    if spec.dtype != dtype or len(spec.shape) != len(axes):
        return False
    # A lowering may lose the size of an axis, but an axis that varies cannot have one.
    return all(listed == axis for listed, axis in zip(spec.shape, axes, strict=True) if isinstance(axis, int))


def _shown(name: str, dtype: str, axes: Sequence[object]) -> str:
    return f"{name} {dtype} [{', '.join('?' if axis is None else str(axis) for axis in axes)}]"
