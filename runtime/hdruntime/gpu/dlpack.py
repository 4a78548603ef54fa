"""DLPack capsules, read and made without a framework: https://dmlc.github.io/dlpack/latest/python_spec.html"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

CPU = 1
CUDA = 2
"""``DLDeviceType``."""

_NAME, _USED_NAME = b"dltensor", b"used_dltensor"

_CODES = {"i": 0, "u": 1, "f": 2}
"""NumPy's kind of a type -> ``DLDataTypeCode``."""


class DlTensor(NamedTuple):
    """What a capsule describes: the address of the first element, sizes and strides in elements, (type, ordinal) of the
    device; `dtype` is None if NumPy has no such type."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype | None
    device: tuple[int, int]


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("axes", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


# A separate handle: the argument types set on its functions do not affect other users of the library.
_python = ctypes.PyDLL(None)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
# Addresses, not objects: a destructor gets an object without references, and must not count references.
_python.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_python.PyCapsule_SetName.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

_exported: dict[int, tuple[_ManagedTensor, Any, Any]] = {}
"""Address of a capsule's structure -> the structure, its arrays, and the owner of the memory."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def capsule_of(tensor: DlTensor, owner: object) -> Any:
    """A capsule of a NumPy type that keeps the owner of the memory alive until its consumer releases it."""
    assert tensor.dtype is not None
    axes = len(tensor.shape)
    sizes = (ctypes.c_int64 * (2 * axes))(*tensor.shape, *tensor.strides)
    shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    strides = ctypes.cast(ctypes.addressof(sizes) + 8 * axes, ctypes.POINTER(ctypes.c_int64))
    kind = _DataType(_CODES[tensor.dtype.kind], 8 * tensor.dtype.itemsize, 1)
    managed = _ManagedTensor(
        _Tensor(tensor.address, _Device(*tensor.device), axes, kind, shape, strides, 0), None, _forget
    )
    address = ctypes.addressof(managed)
    _exported[address] = (managed, sizes, owner)
    return _python.PyCapsule_New(address, _NAME, _destroy)


@contextlib.contextmanager
def open_capsule(capsule: Any) -> Iterator[DlTensor]:
    """Consume a capsule: its producer may free the memory when the block ends. One that was consumed is a
    ValueError."""
    handle = id(capsule)
    if not _python.PyCapsule_IsValid(handle, _NAME):
        raise ValueError("it is no DLPack capsule, or was consumed already")
    address = _python.PyCapsule_GetPointer(handle, _NAME)
    _python.PyCapsule_SetName(handle, _USED_NAME)
    managed = _ManagedTensor.from_address(address)
    try:
        yield _described(managed.tensor)
    finally:
        if managed.deleter:
            managed.deleter(address)


def _described(tensor: _Tensor) -> DlTensor:
    shape = tuple(tensor.shape[: tensor.axes])
    return DlTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=tuple(tensor.strides[: tensor.axes]) if tensor.strides else contiguous_strides(shape),
        dtype=_numpy_type(tensor.dtype),
        device=(tensor.device.kind, tensor.device.ordinal),
    )


def _numpy_type(found: _DataType) -> np.dtype | None:
    kinds = [kind for kind, code in _CODES.items() if code == found.code]
    try:
        return np.dtype(f"{kinds[0]}{found.bits // 8}") if kinds and found.lanes == 1 else None
    except TypeError:
        return None


@_Deleter
def _forget(address: int) -> None:
    _exported.pop(address, None)


@_Destructor
def _destroy(handle: int) -> None:
    # An unconsumed capsule still owns its tensor.
    if _python.PyCapsule_IsValid(handle, _NAME):
        _exported.pop(_python.PyCapsule_GetPointer(handle, _NAME), None)


# A consumer may release a tensor while Python shuts down, after this module is gone.
for _callback in (_forget, _destroy):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))
