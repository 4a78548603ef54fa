"""Where the tensors of a batch lie in one block of memory: pure arithmetic."""

from __future__ import annotations

__all__ = ["Layout", "Place", "layout_of", "padding_ranges", "rounded_up"]

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdruntime.backends.tensorrt.shapes import Shape
from hdruntime.bundle.manifest import TensorSpec

_ALIGNMENT = 256
"""Bytes; TensorRT wants tensors and scratch memory so (``IExecutionContext::setTensorAddress``)."""

_SMALLEST_STEP = 1 << 16
"""Bytes that a block grows by at least."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor: its first byte in the block, and what it is."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensors one after another.

    Attributes:
        places: name -> where.
        size: bytes of the block.
    """

    places: Mapping[str, Place]
    size: int


def layout_of(tensors: Mapping[str, tuple[TensorSpec, np.dtype]], shape: Shape) -> Layout:
    """Lay out tensors for a batch.

    Args:
        tensors: name -> its axes, and the type that the engine has it in.
        shape: sizes of the axes ``batch`` and ``tokens``.
    """
    sizes = {"batch": shape.batch, "tokens": shape.tokens}
    places, end = {}, 0
    for name, (spec, dtype) in tensors.items():
        axes = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape)
        places[name] = Place(offset=end, shape=axes, dtype=dtype)
        end += -(-places[name].size // _ALIGNMENT) * _ALIGNMENT
    return Layout(places=places, size=end)


def rounded_up(size: int) -> int:
    """The size that a block of so many bytes gets, so that it seldom grows: up to an eighth, or 64 KiB, more."""
    step = max(_SMALLEST_STEP, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def padding_ranges(attention_mask: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Runs of padding in a mask [batch, tokens], as (first, end) in the flattened mask; none goes from row to row."""
    batch, tokens = attention_mask.shape
    padding = np.zeros((batch, tokens + 2), dtype=np.int8)
    padding[:, 1:-1] = attention_mask == 0
    steps = np.diff(padding, axis=1)
    rows, first = np.nonzero(steps == 1)
    end = np.nonzero(steps == -1)[1]
    return [
        (int(row) * tokens + int(start), int(row) * tokens + int(stop))
        for row, start, stop in zip(rows, first, end, strict=True)
    ]
