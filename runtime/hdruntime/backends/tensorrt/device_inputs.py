"""Inputs that a caller has in the memory of the GPU: checked, and copied to where the engine reads them."""

from __future__ import annotations

__all__ = ["DeviceInput", "copy_to_device", "device_inputs"]

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hdruntime.backends.tensorrt.layout import Place
from hdruntime.errors import BackendError, InputError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.dlpack import CUDA, DlTensor, open_capsule

_TYPES = (np.dtype(np.int64), np.dtype(np.int32))


@dataclass(frozen=True, kw_only=True)
class DeviceInput:
    """A contiguous array [batch, tokens] of int64 or int32 on the GPU."""

    address: int
    shape: tuple[int, int]
    dtype: np.dtype


@contextlib.contextmanager
def device_inputs(
    given: Mapping[str, object], names: Sequence[str], device: Device, stream: Any
) -> Iterator[dict[str, DeviceInput]]:
    """Read arrays by DLPack, or else by ``__cuda_array_interface__``; a stream waits for whatever makes their values.

    Args:
        given: name -> array.
        names: the inputs of the engine, each of which has to be there.
        device: the GPU; its context is current.
        stream: on which the arrays will be read, all of it before the block ends.

    Raises:
        InputError: an array is missing, elsewhere, or of another type, shape or order.
    """
    if set(given) != set(names):
        raise InputError(f"There are the inputs {sorted(given)}; this engine wants all of {', '.join(names)}.")
    with contextlib.ExitStack() as stack:
        found = {name: _read(name, given[name], device, stream, stack) for name in names}
        shapes = {name: array.shape for name, array in found.items()}
        if len(set(shapes.values())) != 1:
            raise InputError(f"The inputs have the shapes {shapes}; they must be equal.")
        try:
            yield found
        except BaseException:
            # Producers may free their memory now.
            with contextlib.suppress(BackendError):
                device.call("cuStreamSynchronize", stream)
            raise


def copy_to_device(device: Device, source: DeviceInput, target: int, place: Place, stream: Any) -> None:
    """Copy an array into the first rows and tokens of a larger one, whose other values are there already.

    Args:
        device: the GPU.
        source: holds 0 or more; where it is narrower than the target, the target's upper halves are 0.
        target: address.
        place: shape [batch, tokens] and type of the target.
        stream: what the copy is enqueued on.
    """
    rows, tokens = source.shape
    pitch, wanted = tokens * source.dtype.itemsize, place.shape[1] * place.dtype.itemsize
    if source.dtype == place.dtype:
        _copy_2d(device, source.address, pitch, target, wanted, width=pitch, height=rows, stream=stream)
        return
    # Types differ by their upper halves: the lower half of each value is a column of four bytes, little-endian.
    sizes = source.dtype.itemsize, place.dtype.itemsize
    for row in range(rows):
        places = source.address + row * pitch, target + row * wanted
        _copy_2d(device, places[0], sizes[0], places[1], sizes[1], width=min(sizes), height=tokens, stream=stream)


def _copy_2d(
    device: Device, source: int, source_pitch: int, target: int, pitch: int, *, width: int, height: int, stream: Any
) -> None:
    copy = device.driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = device.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch = source, source_pitch
    copy.dstDevice, copy.dstPitch = target, pitch
    copy.WidthInBytes, copy.Height = width, height
    device.call("cuMemcpy2DAsync", copy, stream)


def _read(name: str, value: Any, device: Device, stream: Any, stack: contextlib.ExitStack) -> DeviceInput:
    # DLPack first: it says which stream has to wait, and PyTorch's other interface does not.
    if hasattr(value, "__dlpack__"):
        kind, ordinal = value.__dlpack_device__()
        _check_device(name, "on the GPU" if kind == CUDA else "not in the memory of a GPU", ordinal, kind, device)
        return _checked(name, stack.enter_context(open_capsule(value.__dlpack__(stream=int(stream)))))
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise InputError(
            f"{name} is a {type(value).__name__}; it must be an array on the GPU, with __dlpack__ or "
            "__cuda_array_interface__."
        )
    return _checked(name, _from_interface(name, interface, device, stream))


def _from_interface(name: str, interface: Mapping[str, Any], device: Device, stream: Any) -> DlTensor:
    if interface.get("mask") is not None:
        raise InputError(f"{name} has a mask of its own; give it as attention_mask.")
    address, dtype = interface["data"][0], np.dtype(interface["typestr"])
    attribute = device.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    if address:
        ordinal = int(device.call("cuPointerGetAttribute", attribute, address))
        _check_device(name, "on the GPU", ordinal, CUDA, device)
    # Before version 3 there is no word about streams; the default stream is what everyone used.
    producer = interface.get("stream", 1)
    if producer is not None:
        event = device.call("cuEventCreate", 0)
        device.call("cuEventRecord", event, producer)
        device.call("cuStreamWaitEvent", stream, event, 0)
        device.call("cuEventDestroy", event)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _contiguous(shape, dtype.itemsize)
    return DlTensor(
        address=address,
        shape=shape,
        strides=tuple(stride // dtype.itemsize for stride in strides),
        dtype=dtype,
        device=(CUDA, device.ordinal),
    )


def _checked(name: str, tensor: DlTensor) -> DeviceInput:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}; it must be [batch, tokens], at least one of each.")
    if tensor.dtype not in _TYPES:
        raise InputError(f"{name} is of type {tensor.dtype or 'unknown'}; on the GPU it must be int64 or int32.")
    rows, tokens = tensor.shape
    # Strides of an axis with one element mean nothing.
    if (tokens > 1 and tensor.strides[1] != 1) or (rows > 1 and tensor.strides[0] != tokens):
        raise InputError(f"{name} is not contiguous (strides {list(tensor.strides)}); copy it: .contiguous()")
    assert tensor.dtype is not None
    return DeviceInput(address=tensor.address, shape=(rows, tokens), dtype=tensor.dtype)


def _check_device(name: str, where: str, ordinal: int, kind: int, device: Device) -> None:
    if kind != CUDA or ordinal != device.ordinal:
        raise InputError(
            f"{name} is {where}{f' {ordinal}' if kind == CUDA else ''}; the engine is on GPU {device.ordinal}.\n"
            "Move it there, or give arrays in the memory of the CPU."
        )


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :])) * itemsize for axis in range(len(shape)))
