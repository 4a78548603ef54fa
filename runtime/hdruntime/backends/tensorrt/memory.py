"""Blocks of memory that are reused from batch to batch and grow when a batch needs more."""

from __future__ import annotations

__all__ = ["Block"]

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.backends.tensorrt.layout import Layout, rounded_up
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.cuda import Device


class Block:
    """Memory of a GPU, or host memory that it copies from and to by itself.

    Args:
        device: the GPU.
        pinned: host memory.
        wait: called before memory is given back; it returns when nothing uses it any more.

    Attributes:
        address: of the first byte; 0 while it has none.
        size: bytes.
        moves: how often the address changed.
    """

    def __init__(self, device: Device, *, pinned: bool = False, wait: Callable[[], Any] = lambda: None) -> None:
        self._device, self._pinned, self._wait = device, pinned, wait
        self.address = self.size = self.moves = 0

    def ensure(self, size: int) -> None:
        """Have at least so many bytes. What was in a block that grows is lost.

        Raises:
            OutOfMemoryError: there are not so many; the block has none then.
        """
        if size <= self.size:
            return
        # Given back first, so that the old and the new one need not fit at the same time.
        self.release()
        try:
            self._allocate(rounded_up(size))
        except OutOfMemoryError:
            self._allocate(size)

    def release(self) -> None:
        """Give the memory back; :meth:`ensure` gets new one."""
        if not self.size:
            return
        self._wait()
        address, self.address, self.size = self.address, 0, 0
        self.moves += 1
        self._device.call("cuMemFreeHost" if self._pinned else "cuMemFree", address)

    def arrays(self, layout: Layout) -> dict[str, npt.NDArray[Any]]:
        """The tensors of a layout, in place; of pinned memory only."""
        assert self._pinned
        assert layout.size <= self.size
        return {
            name: np.ctypeslib.as_array((ctypes.c_uint8 * place.size).from_address(self.address + place.offset))
            .view(place.dtype)
            .reshape(place.shape)
            for name, place in layout.places.items()
        }

    def addresses(self, layout: Layout) -> dict[str, int]:
        """Where the tensors of a layout are."""
        assert layout.size <= self.size
        return {name: self.address + place.offset for name, place in layout.places.items()}

    def _allocate(self, size: int) -> None:
        if self._pinned:
            self.address = int(self._device.call("cuMemHostAlloc", size, 0))
        else:
            self.address = int(self._device.call("cuMemAlloc", size))
        self.size = size
