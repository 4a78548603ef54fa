"""Memories in ONNX Runtime on a GPU: outputs of a run become inputs of the next one, on the same device."""

from __future__ import annotations

__all__ = ["DeviceMemories"]

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hdruntime.arrays import IntArray
from hdruntime.backends.bundle_runner import Inputs, Outputs
from hdruntime.backends.onnxruntime_sessions import GraphRunner
from hdruntime.bundle.memory_start import memory_at_start
from hdruntime.errors import BackendUnavailableError
from hdruntime.gpu.dlpack import CPU, CUDA, DlTensor, capsule_of, contiguous_strides

_DEVICES = {"cpu": CPU, "cuda": CUDA}
"""ONNX Runtime's names of devices -> DLPack's."""


class DeviceMemories:
    """The memories of some rows as ONNX Runtime's values on its device; see `hdruntime.backends.Memories`.

    Args:
        runner: on the device.
        rows: of a batch.
    """

    def __init__(self, runner: GraphRunner, rows: int) -> None:
        self._runner = runner
        starts = {spec.name: memory_at_start(spec, rows=1, memory=runner.most_memory) for spec in runner.memories}
        # A copy each, also where the device is the CPU.
        self._read, self._written = (
            {name: runner.on_device(np.repeat(start, rows, axis=0)) for name, start in starts.items()} for _ in range(2)
        )
        self._starts = {name: runner.on_device(start) for name, start in starts.items()}
        self._fed_from = {spec.name: str(spec.fed_from) for spec in runner.memories}
        self._fresh = True

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run one segment of each row; see `hdruntime.backends.Memories.run`."""
        self._fresh = False
        left = {self._fed_from[name]: value for name, value in self._written.items()}
        results = self._runner.run_bound(inputs, outputs, self._read, left)
        self._read, self._written = self._written, self._read
        return results

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """See `hdruntime.backends.Memories.computed_tokens`."""
        return self._runner.computed_tokens(attention_mask)

    def reset(self, rows: Sequence[int]) -> None:
        """Forget rows' memories; see `hdruntime.backends.Memories.reset`.

        Raises:
            BackendUnavailableError: this version of ONNX Runtime does not share memory by DLPack.
        """
        if self._fresh:
            return
        for name, start in self._starts.items():
            for row in rows:
                _row(self._read[name], row, self._runner.device[1]).update_inplace(start)


def _row(value: Any, row: int, number: int) -> Any:
    """One row of an ``OrtValue`` on the device of that number, in place."""
    import onnxruntime

    from_dlpack = getattr(onnxruntime.OrtValue, "from_dlpack", None)
    if from_dlpack is None:
        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} cannot begin another document in a row of memories on a GPU.\n"
            "Update it: pip install -U onnxruntime-gpu. Or stream each document by itself: session.stream(document)"
        )
    shape = (1, *value.shape()[1:])
    place = value.data_ptr() + row * math.prod(shape) * np.dtype(np.float32).itemsize
    device = (_DEVICES[value.device_name().lower()], number)
    described = DlTensor(
        address=place, shape=shape, strides=contiguous_strides(shape), dtype=np.dtype(np.float32), device=device
    )
    return from_dlpack(capsule_of(described, value))
