"""Inputs that are already in GPU memory: checked, and copied to the input buffers of a slot."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hdruntime.arrays import AnyArray
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.errors import BackendError, InputError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.dlpack import CUDA, DlTensor, contiguous_strides, open_capsule
from hdruntime.gpu.layout import Place

_TYPES = {"int64": (np.dtype(np.int64), np.dtype(np.int32)), "float32": (np.dtype(np.float32),)}
"""Type in the manifest -> accepted types of arrays."""


class DeviceInput(NamedTuple):
    """A contiguous array [batch, tokens] on the GPU, or one [batch, ...] whose other axes are taken as one."""

    address: int
    shape: tuple[int, int]
    dtype: np.dtype


@contextlib.contextmanager
def device_inputs(
    inputs: Mapping[str, object], specs: Mapping[str, TensorSpec], device: Device, stream: Any
) -> Iterator[dict[str, DeviceInput]]:
    """Read arrays by DLPack, or else by ``__cuda_array_interface__``; a stream waits for the work that computes them.

    The stream reads all arrays before the block ends. `specs` has the model's inputs by name; all are required.

    Raises:
        InputError: an array is missing, elsewhere, or of another type, shape or order.
    """
    if set(inputs) != set(specs):
        raise InputError(f"The inputs are {sorted(inputs)}; this bundle needs all of {', '.join(specs)}.")
    with contextlib.ExitStack() as stack:
        arrays = {name: _read(spec, inputs[name], device, stream, stack) for name, spec in specs.items()}
        shapes = {name: array.shape for name, array in arrays.items() if specs[name].has_tokens_axis}
        if len(set(shapes.values())) != 1 or len({array.shape[0] for array in arrays.values()}) != 1:
            shapes = {name: array.shape for name, array in arrays.items()}
            raise InputError(f"The inputs have the shapes {shapes}; they must be equal.")
        try:
            yield arrays
        except BaseException:
            # Producers may free their memory from here on.
            with contextlib.suppress(BackendError):
                device.call("cuStreamSynchronize", stream)
            raise


def size_of_memory(arrays: Mapping[str, DeviceInput], specs: Mapping[str, TensorSpec]) -> int:
    """Size of the axis ``memory`` of a batch, which all arrays with that axis agree in; 0 without one."""
    sizes = {
        name: array.shape[1] // math.prod(size for size in specs[name].shape[2:] if isinstance(size, int))
        for name, array in arrays.items()
        if specs[name].has_memory_axis
    }
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"The recurrent states have memory caches of different sizes: {sizes}.", hint="Pass the states of one call."
        )
    return next(iter(sizes.values()), 0)


def copy_to_device(device: Device, source: DeviceInput, target: int, place: Place, stream: Any) -> None:
    """Copy an array into the first rows and tokens of a larger one of its type that already holds its padding.

    The target is an address, `place` its shape [batch, ...].
    """
    rows, tokens = source.shape
    # Not cuMemcpy2DAsync, which CUDA promises for pitches of cuMemAllocPitch alone; rows without padding are one copy.
    size, wanted = tokens * source.dtype.itemsize, math.prod(place.shape[1:]) * place.dtype.itemsize
    parts, size = (1, rows * size) if size == wanted else (rows, size)
    for part in range(parts):
        device.call("cuMemcpyDtoDAsync", target + part * wanted, source.address + part * size, size, stream)


def values_of(device: Device, source: DeviceInput, stream: Any) -> AnyArray:
    """The values of an array, [batch, tokens], in the memory of the CPU; the stream waits for the work that computes
    it."""
    values = np.empty(source.shape, source.dtype)
    device.call("cuStreamSynchronize", stream)
    device.call("cuMemcpyDtoH", values.ctypes.data, source.address, values.nbytes)
    return values


def _read(spec: TensorSpec, value: Any, device: Device, stream: Any, stack: contextlib.ExitStack) -> DeviceInput:
    name = spec.name
    # DLPack first: unlike PyTorch's other interface, it takes the stream that has to wait.
    if hasattr(value, "__dlpack__"):
        kind, ordinal = value.__dlpack_device__()
        _check_device(name, "on the GPU" if kind == CUDA else "not in the memory of a GPU", ordinal, kind, device)
        return _checked(spec, stack.enter_context(open_capsule(value.__dlpack__(stream=int(stream)))))
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise InputError(
            f"{name} is a {type(value).__name__}; it must be an array on the GPU, with __dlpack__ or "
            "__cuda_array_interface__."
        )
    return _checked(spec, _from_interface(name, interface, device, stream))


def _from_interface(name: str, interface: Mapping[str, Any], device: Device, stream: Any) -> DlTensor:
    if interface.get("mask") is not None:
        raise InputError(f"{name} has a mask of its own; give it as attention_mask.")
    address, dtype = interface["data"][0], np.dtype(interface["typestr"])
    attribute = device.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    if address:
        ordinal = int(device.call("cuPointerGetAttribute", attribute, address))
        _check_device(name, "on the GPU", ordinal, CUDA, device)
    # Before version 3 the interface has no stream; producers used the default stream.
    producer = interface.get("stream", 1)
    if producer is not None:
        event = device.call("cuEventCreate", 0)
        device.call("cuEventRecord", event, producer)
        device.call("cuStreamWaitEvent", stream, event, 0)
        device.call("cuEventDestroy", event)
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    in_elements = tuple(stride // dtype.itemsize for stride in strides) if strides else contiguous_strides(shape)
    return DlTensor(address=address, shape=shape, strides=in_elements, dtype=dtype, device=(CUDA, device.ordinal))


def _checked(spec: TensorSpec, tensor: DlTensor) -> DeviceInput:
    name, sizes, types = spec.name, spec.shape, _TYPES[spec.dtype]
    fits = len(tensor.shape) == len(sizes) and 0 not in tensor.shape
    if not fits or any(isinstance(size, int) and size != own for size, own in zip(sizes, tensor.shape, strict=True)):
        wanted = ", ".join(map(str, sizes))
        raise InputError(f"{name} has shape {list(tensor.shape)}; it must be [{wanted}], at least one of each.")
    if tensor.dtype not in types:
        wanted = " or ".join(map(str, types))
        raise InputError(f"{name} is of type {tensor.dtype or 'unknown'}; on the GPU it must be {wanted}.")
    # Strides of an axis with one element have no meaning.
    contiguous = contiguous_strides(tensor.shape)
    if any(n > 1 and own != right for n, own, right in zip(tensor.shape, tensor.strides, contiguous, strict=True)):
        raise InputError(f"{name} is not contiguous (strides {list(tensor.strides)}); copy it: .contiguous()")
    assert tensor.dtype is not None
    return DeviceInput(address=tensor.address, shape=(tensor.shape[0], math.prod(tensor.shape[1:])), dtype=tensor.dtype)


def _check_device(name: str, where: str, ordinal: int, kind: int, device: Device) -> None:
    if kind != CUDA or ordinal != device.ordinal:
        raise InputError(
            f"{name} is {where}{f' {ordinal}' if kind == CUDA else ''}; the session is on GPU {device.ordinal}.",
            hint="Move it there, or give arrays in the memory of the CPU.",
        )
