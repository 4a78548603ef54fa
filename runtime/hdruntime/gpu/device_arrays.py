"""Results that stay in the memory of a GPU, for callers that continue there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.errors import InputError
from hdruntime.gpu.dlpack import CUDA, DlTensor, capsule_of, contiguous_strides

if TYPE_CHECKING:
    from hdruntime.gpu.cuda import Device

_DTYPE = np.dtype(np.float32)

_LEGACY_STREAM = 1
"""``CU_STREAM_LEGACY``; both protocols call it 1."""


class DeviceArray:
    """A float32 array in GPU memory, which is freed with the last reference to the array.

    It stays valid after its session was closed. PyTorch takes it by ``torch.from_dlpack(array)``, CuPy by
    ``cupy.from_dlpack(array)`` or ``cupy.asarray(array)``, none of which copies.

    Attributes:
        shape: sizes of the axes.
        dtype: float32.
    """

    dtype = _DTYPE

    def __init__(self, device: Device, shape: tuple[int, ...], *, padded: tuple[int, ...]) -> None:
        """Allocate memory; call `mark_ready` after enqueueing the work that fills it. Made by backends on a GPU.

        The GPU's context is current. `padded` is the shape of the memory; the array is the first part of each axis.
        """
        self.shape = shape
        self._device, self._padded, self._strides = device, padded, contiguous_strides(padded)
        self.address = int(device.call("cuMemAlloc", max(_DTYPE.itemsize, int(np.prod(padded)) * _DTYPE.itemsize)))
        self._ready: Any = None
        self._free = weakref.finalize(self, _free, device, self.address)

    def mark_ready(self, stream: Any) -> None:
        """Declare that the array holds its values after the work enqueued on the stream so far."""
        self._ready = self._device.call("cuEventCreate", 0)
        self._free.detach()
        self._free = weakref.finalize(self, _free, self._device, self.address, self._ready)
        self._device.call("cuEventRecord", self._ready, stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. Some consumers ignore streams, so this waits for the values."""
        self._wait()
        return {
            "shape": self.shape,
            "typestr": _DTYPE.str,
            "data": (self.address, False),
            "strides": tuple(stride * _DTYPE.itemsize for stride in self._strides),
            "stream": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule; the consumer's stream waits for the values, and the caller does not.

        Args:
            stream: number of the stream, as DLPack defines it: -1 for no waiting, 1 (or None) for the legacy default
                stream, 2 for the thread's default stream, else a handle.
            max_version: ignored; capsules before version 1.0 suit every consumer.
            dl_device: None, or the array's own device.
            copy: not True.

        Raises:
            BufferError: the caller requests another device or a copy.
            InputError: the stream is invalid.
        """
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("a DeviceArray is handed over where it is and not copied; use to_numpy() for the CPU")
        if stream == 0 or (stream is not None and stream < -1):
            raise InputError(f"stream is {stream}; give -1, 1, 2 or the handle of a stream, as DLPack has them.")
        if stream != -1:
            with self._device.current():
                self._device.call("cuStreamWaitEvent", stream or _LEGACY_STREAM, self._ready, 0)
        tensor = DlTensor(
            address=self.address,
            shape=self.shape,
            strides=self._strides,
            dtype=_DTYPE,
            device=self.__dlpack_device__(),
        )
        return capsule_of(tensor, self)

    def to_numpy(self) -> FloatArray:
        """A copy in the memory of the CPU."""
        self._wait()
        whole = np.empty(self._padded, _DTYPE)
        with self._device.current():
            self._device.call("cuMemcpyDtoH", whole.ctypes.data, self.address, whole.nbytes)
        return np.ascontiguousarray(whole[tuple(map(slice, self.shape))])

    def _wait(self) -> None:
        with self._device.current():
            self._device.call("cuEventSynchronize", self._ready)


def _free(device: Device, address: int, event: Any = None) -> None:
    def free() -> None:
        # A consumer may have released the array while its kernels still read it.
        device.call("cuCtxSynchronize")
        device.call("cuMemFree", address)
        if event is not None:
            device.call("cuEventDestroy", event)

    device.discard(free)
