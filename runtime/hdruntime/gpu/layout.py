"""Positions of a batch's tensors in one block of memory: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import TensorSpec

_ALIGNMENT = 256
"""Bytes; TensorRT requires it of tensors and scratch memory (``IExecutionContext::setTensorAddress``)."""

_SMALLEST_STEP = 1 << 16
"""Bytes that a block grows by at least."""


class Shape(NamedTuple):
    """Shape [batch, tokens] of a batch after padding, and its axis ``memory``, which is not padded; 0 without one."""

    batch: int
    tokens: int
    memory: int = 0


class ShapeChoice(NamedTuple):
    """The shape to pad a batch to, and the number of the engine's profile for it; 0 for a model without profiles."""

    profile: int
    shape: Shape


class Place(NamedTuple):
    """A tensor: its first byte in the block, its shape and its type."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """Tensors one after another in a block of `size` bytes: name -> position."""

    places: Mapping[str, Place]
    size: int


def layout_of(tensors: Mapping[str, tuple[TensorSpec, np.dtype]], shape: Shape) -> Layout:
    """Lay out tensors for a batch: name -> its axes, and its type in the engine; `shape` has the sizes of named
    axes."""
    sizes = shape._asdict()
    places, end = {}, 0
    for name, (spec, dtype) in tensors.items():
        axes = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape)
        places[name] = Place(offset=end, shape=axes, dtype=dtype)
        end += -(-places[name].size // _ALIGNMENT) * _ALIGNMENT
    return Layout(places=places, size=end)


def rounded_up(size: int) -> int:
    """The size to allocate for a block of this many bytes so that it seldom grows: at most 1/8 or 64 KiB more."""
    step = max(_SMALLEST_STEP, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def padding_ranges(attention_mask: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Runs of padding in a mask [batch, tokens], as (first, end) in the flattened mask."""
    padding = np.concatenate(([False], attention_mask.ravel() == 0, [False]))
    edges = np.flatnonzero(padding[1:] != padding[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
