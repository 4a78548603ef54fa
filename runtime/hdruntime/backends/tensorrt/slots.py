"""A place for one batch on its way: staging memory, device memory, events, and the results when they are there."""

from __future__ import annotations

__all__ = ["FloatArrays", "Pending", "Slot"]

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hdruntime.backends.tensorrt.layout import Layout
from hdruntime.backends.tensorrt.memory import Block
from hdruntime.gpu.cuda import Device

FloatArrays = dict[str, npt.NDArray[np.float32]]

_WITHOUT_TIMES = 2
"""``CU_EVENT_DISABLE_TIMING``."""


class Pending:
    """A batch that was started. Whoever asks first waits for it: its caller, or the next batch that needs its slot.

    Args:
        collect: waits for the GPU and copies the results out of the slot.

    Attributes:
        done: the slot is no longer needed.
    """

    def __init__(self, collect: Callable[[], FloatArrays]) -> None:
        self._collect: Callable[[], FloatArrays] | None = collect
        self._results: FloatArrays = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.done = False

    def finish(self) -> None:
        """Have the results, or why there are none, outside of the slot; no error of the batch is raised."""
        with self._lock:
            collect, self._collect = self._collect, None
            if collect is None:
                return
            try:
                self._results = collect()
            except BaseException as error:
                # Raised again for whoever started the batch; Ctrl-C is for whoever waits, too.
                self._error = error
                if not isinstance(error, Exception):
                    raise
            finally:
                self.done = True

    def results(self) -> FloatArrays:
        """Wait for the results.

        Raises:
            BackendError: the batch failed.
        """
        self.finish()
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._results


class Slot:
    """One of the places that batches take in turn.

    Attributes:
        staged_inputs: pinned; what the copy to the device reads.
        staged_outputs: pinned; what the copy from the device writes.
        inputs: on the device.
        outputs: on the device.
        copied_in: the inputs are on the device.
        began: the batch's turn came on the GPU.
        computed: the outputs are on the device.
        copied_out: the outputs are in `staged_outputs`.
        pending: the batch that has the slot.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.staged_inputs, self.staged_outputs = Block(device, pinned=True), Block(device, pinned=True)
        self.inputs, self.outputs = Block(device), Block(device)
        self.copied_in, self.copied_out = (device.call("cuEventCreate", _WITHOUT_TIMES) for _ in range(2))
        self.began, self.computed = (device.call("cuEventCreate", 0) for _ in range(2))
        self.pending: Pending | None = None

    def ensure(self, inputs: Layout, outputs: Layout) -> None:
        """Have memory for a batch.

        Raises:
            OutOfMemoryError: there is not enough.
        """
        self.staged_inputs.ensure(inputs.size)
        self.inputs.ensure(inputs.size)
        self.outputs.ensure(outputs.size)
        self.staged_outputs.ensure(outputs.size)

    @property
    def busy(self) -> bool:
        """Whether a batch still needs the memory."""
        return self.pending is not None and not self.pending.done

    def finish(self) -> None:
        """Let go of the batch that has the slot, which keeps its results."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()

    def gpu_ms(self) -> float:
        """What the GPU took for the latest batch that is done, in milliseconds."""
        return float(self._device.call("cuEventElapsedTime", self.began, self.computed))

    def release(self) -> None:
        """Give memory back; nothing may use it any more."""
        for block in (self.staged_inputs, self.inputs, self.outputs, self.staged_outputs):
            block.release()

    def close(self) -> None:
        """Give everything back."""
        self.release()
        for event in (self.copied_in, self.began, self.computed, self.copied_out):
            self._device.call("cuEventDestroy", event)
