"""Recurrent states that stay on the GPU from one batch to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hdruntime.bundle.manifest import Fill, Manifest
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.device_arrays import DeviceArray
from hdruntime.gpu.layout import Layout

_ITEM_BYTES = 4
"""Of float32."""

_ZERO, _ONE = 0, int(np.float32(1).view(np.uint32))
"""Bits of the numbers that recurrent states begin with."""


class DeviceStates:
    """The recurrent states of some rows in GPU memory, at addresses that stay the same.

    A batch copies them into its own inputs and its outputs back, on the stream that computes: CUDA graphs of its shape
    keep their addresses, and states of any number of documents share them. The GPU's context must be current in every
    call.

    Attributes:
        fed_from: name of each state's input -> name of the output that replaces it.
        tokens: size of the axis ``memory``; 0 without one.
    """

    def __init__(self, device: Device, manifest: Manifest, stream: Any, *, rows: int) -> None:
        self._device, self._stream, self._rows = device, stream, rows
        self.tokens = manifest.max_memory
        self.fed_from = {spec.name: str(spec.fed_from) for spec in manifest.recurrent_states}
        self._bits = {
            spec.name: _ONE if spec.default.fill is Fill.ONES else _ZERO for spec in manifest.recurrent_states
        }
        self._arrays = {}
        for spec in manifest.recurrent_states:
            sizes = (rows, *(self.tokens if axis == "memory" else int(axis) for axis in spec.shape[1:]))
            self._arrays[spec.name] = DeviceArray(device, sizes, padded=sizes)
        self.reset(range(rows))
        for array in self._arrays.values():
            array.mark_ready(stream)

    def reset(self, rows: Sequence[int]) -> None:
        """Set rows to their defaults."""
        for name, array in self._arrays.items():
            items = math.prod(array.shape[1:])
            for row in rows:
                address = array.address + row * items * _ITEM_BYTES
                self._device.call("cuMemsetD32Async", address, self._bits[name], items, self._stream)

    def read(self, inputs: Mapping[str, int], layout: Layout) -> None:
        """Copy the states to the addresses of a batch's inputs; rows of padding are 0."""
        for name, array in self._arrays.items():
            size, whole = _size(array), layout.places[name].size
            self._device.call("cuMemcpyDtoDAsync", inputs[name], array.address, size, self._stream)
            if size < whole:
                self._device.call("cuMemsetD8Async", inputs[name] + size, 0, whole - size, self._stream)

    def replace(self, outputs: Mapping[str, int]) -> None:
        """Copy the next states, at the addresses of a batch's outputs, into the states."""
        for name, array in self._arrays.items():
            address = outputs[self.fed_from[name]]
            self._device.call("cuMemcpyDtoDAsync", array.address, address, _size(array), self._stream)


def _size(array: DeviceArray) -> int:
    return math.prod(array.shape) * _ITEM_BYTES
