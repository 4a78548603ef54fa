"""Arrays of another library in the memory of a simulated GPU."""

from __future__ import annotations

__all__ = ["ByDlpack", "ByInterface", "OnGpu", "current"]

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hdruntime.gpu.dlpack import CUDA, DlTensor, capsule_of


class OnGpu:
    """An array that another library computes on a stream of its own, some time later.

    Args:
        machine: with the GPU.
        values: what it will hold.
    """

    def __init__(self, machine: Any, values: np.ndarray) -> None:
        self.device, self.values = machine.device, values
        self.address = self.device.upload(np.full_like(values, 99))
        self.stream = self.device.new_stream()
        self.device.later(self.stream, self._write)

    def _write(self) -> None:
        raw = np.frombuffer(self.values.tobytes(), np.uint8)
        self.device.bytes_at(self.address, raw.size)[:] = raw

    def free(self) -> None:
        self.device.forget(self.address)
        self.device.cuStreamDestroy(self.stream)


class ByDlpack(OnGpu):
    place = (CUDA, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, *, stream: int) -> Any:
        event = self.device.cuEventCreate(2)[1]
        self.device.cuEventRecord(event, self.stream)
        self.device.cuStreamWaitEvent(stream, event, 0)
        self.device.cuEventDestroy(event)
        strides = tuple(stride // self.values.itemsize for stride in self.values.strides)
        return capsule_of(
            DlTensor(
                address=self.address,
                shape=self.values.shape,
                strides=strides,
                dtype=self.values.dtype,
                device=self.place,
            ),
            self,
        )


class ByInterface(OnGpu):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.address, True),
            "version": 3,
            "stream": int(self.stream),
        }


@contextlib.contextmanager
def current(device: Any) -> Iterator[None]:
    """The GPU is current, for whatever stands for another library."""
    device.cuCtxPushCurrent(0xC0)
    yield
    device.cuCtxPopCurrent()
