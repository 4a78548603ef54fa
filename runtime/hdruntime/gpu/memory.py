"""Blocks of memory that batches reuse, and that grow when a batch needs more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from hdruntime.arrays import AnyArray
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.layout import Layout, rounded_up


class Block:
    """GPU memory, or pinned host memory that the GPU copies from and to. `wait` is called before memory is freed: it
    returns when no work uses the memory.

    Attributes:
        address: address of the first byte; 0 without memory.
        moves: how often the address changed.
    """

    def __init__(self, device: Device, *, pinned: bool = False, wait: Callable[[], Any] = lambda: None) -> None:
        self._device, self._pinned, self._wait = device, pinned, wait
        self.address = self.size = self.moves = 0

    def ensure(self, size: int) -> None:
        """Grow to at least this many bytes; growing loses the content, and a failure leaves the block empty."""
        if size <= self.size:
            return
        # Freed first, so that the old and the new memory need not fit at the same time.
        self.release()
        try:
            self._allocate(rounded_up(size))
        except OutOfMemoryError:
            self._allocate(size)

    def release(self) -> None:
        """Free the memory; :meth:`ensure` allocates again."""
        if not self.size:
            return
        self._wait()
        address, self.address, self.size = self.address, 0, 0
        self.moves += 1
        self._device.call("cuMemFreeHost" if self._pinned else "cuMemFree", address)

    def arrays(self, layout: Layout) -> dict[str, AnyArray]:
        """The tensors of a layout, in place; for pinned memory only."""
        assert self._pinned
        assert layout.size <= self.size
        return {
            name: np.ctypeslib.as_array((ctypes.c_uint8 * place.size).from_address(self.address + place.offset))
            .view(place.dtype)
            .reshape(place.shape)
            for name, place in layout.places.items()
        }

    def addresses(self, layout: Layout) -> dict[str, int]:
        """Addresses of a layout's tensors, by name."""
        assert layout.size <= self.size
        return {name: self.address + place.offset for name, place in layout.places.items()}

    def _allocate(self, size: int) -> None:
        call = self._device.call
        self.address = int(call("cuMemHostAlloc", size, 0) if self._pinned else call("cuMemAlloc", size))
        self.size = size
