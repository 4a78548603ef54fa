"""DLPack capsules: made, read, and freed once."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from hdruntime.gpu import dlpack
from hdruntime.gpu.dlpack import CPU, DlTensor, capsule_of, open_capsule
from support.comparators import named_case


class Exporter:
    """An array that our capsules export."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **options: Any) -> Any:
        values = self.values
        strides = tuple(stride // values.itemsize for stride in values.strides)
        tensor = DlTensor(
            address=values.ctypes.data, shape=values.shape, strides=strides, dtype=values.dtype, device=(CPU, 0)
        )
        return capsule_of(tensor, self)


def test_numpy_reads_our_capsules() -> None:
    for dtype, shape in itertools.product(
        [np.float32, np.float64, np.int32, np.int64, np.uint8], [(), (3,), (2, 3), (2, 1, 5)]
    ):
        with named_case(dtype, shape):
            values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            read = np.from_dlpack(Exporter(values))
            assert read.dtype == dtype
            np.testing.assert_array_equal(read, values)
            assert read.ctypes.data == values.ctypes.data
    part = np.arange(24.0).reshape(4, 6)[:3, :4]
    np.testing.assert_array_equal(np.from_dlpack(Exporter(part)), part)


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_we_read_capsules_of_numpy(dtype: type) -> None:
    values = np.arange(24).reshape(4, 6).astype(dtype)[1:, 2:4]
    with open_capsule(values.__dlpack__()) as tensor:
        assert (tensor.shape, tensor.dtype, tensor.device) == ((3, 2), np.dtype(dtype), (CPU, 0))
        assert tensor.strides == (6, 1)
        first = (ctypes.c_uint8 * values.itemsize).from_address(tensor.address)
        assert bytes(first) == values[0, 0].tobytes()


def test_pytorch_reads_our_capsules_and_we_read_its() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'hdexport[export]'")
    with open_capsule(torch.arange(6, dtype=torch.int32).reshape(2, 3).__dlpack__()) as tensor:
        assert (tensor.shape, tensor.strides, tensor.dtype) == ((2, 3), (3, 1), np.dtype(np.int32))
    with open_capsule(torch.zeros(2, dtype=torch.bfloat16).__dlpack__()) as tensor:
        assert tensor.dtype is None
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(torch.from_dlpack(Exporter(values)).numpy(), values)


def test_the_owner_lives_as_long_as_its_consumer() -> None:
    exporter = Exporter(np.arange(3.0))
    alive = weakref.ref(exporter)
    read = np.from_dlpack(exporter)
    del exporter
    gc.collect()
    assert alive() is not None
    del read
    assert alive() is None
    exporter = Exporter(np.arange(3.0))
    alive = weakref.ref(exporter)
    with open_capsule(exporter.__dlpack__()):
        del exporter
        gc.collect()
        assert alive() is not None
    assert alive() is None


def test_an_unconsumed_capsule_releases_its_owner() -> None:
    exporter = Exporter(np.arange(3.0))
    alive = weakref.ref(exporter)
    capsule = exporter.__dlpack__()
    del exporter
    gc.collect()
    assert alive() is not None
    references = sys.getrefcount(None)
    del capsule
    assert alive() is None
    assert abs(sys.getrefcount(None) - references) < 100
    assert dlpack._exported == {}


def test_a_capsule_is_consumed_once() -> None:
    capsule = Exporter(np.arange(3.0)).__dlpack__()
    with open_capsule(capsule):
        pass
    for other in (capsule, 5, None):
        with pytest.raises(ValueError, match="no DLPack capsule, or was consumed already"), open_capsule(other):
            pass
