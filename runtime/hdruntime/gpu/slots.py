"""Batches in flight: the streams that they share, and a slot of memory and events for each."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hdruntime.arrays import Outputs
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.layout import Layout
from hdruntime.gpu.memory import Block

_WITHOUT_TIMES = 2
"""``CU_EVENT_DISABLE_TIMING``."""

_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: the stream does not wait for the legacy default stream."""


class PendingBatch:
    """A started batch. The first to request it waits: its caller, or the next batch that needs its slot.

    `collect` waits for the GPU and copies the results out of the slot; with `done`, the batch no longer needs the slot.
    """

    def __init__(self, collect: Callable[[], Outputs]) -> None:
        self._collect: Callable[[], Outputs] | None = collect
        self._results: Outputs = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.done = False

    def finish(self) -> None:
        """Move the results, or the batch's error, out of the slot; the error is not raised."""
        with self._lock:
            collect, self._collect = self._collect, None
            if collect is None:
                return
            try:
                self._results = collect()
            except BaseException as error:
                # Raised again in `results`; Ctrl-C is also raised here.
                self._error = error
                if not isinstance(error, Exception):
                    raise
            finally:
                self.done = True

    def results(self) -> Outputs:
        """Wait for the results."""
        self.finish()
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._results


class Slot:
    """The memory and the events of one batch.

    Attributes:
        staged_inputs: pinned; source of the copy to the device.
        staged_outputs: pinned; target of the copy from the device.
        copied_in: event: the inputs are on the device.
        began: event: the GPU begins to compute the batch.
        computed: event: the outputs are on the device.
        copied_out: event: the outputs are in `staged_outputs`.
        pending: the batch that uses the slot.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.staged_inputs, self.staged_outputs = Block(device, pinned=True), Block(device, pinned=True)
        self.inputs, self.outputs = Block(device), Block(device)
        self.copied_in, self.copied_out = (device.call("cuEventCreate", _WITHOUT_TIMES) for _ in range(2))
        self.began, self.computed = (device.call("cuEventCreate", 0) for _ in range(2))
        self.pending: PendingBatch | None = None

    def ensure(self, inputs: Layout, outputs: Layout) -> None:
        """Allocate memory for a batch."""
        self.staged_inputs.ensure(inputs.size)
        self.inputs.ensure(inputs.size)
        self.outputs.ensure(outputs.size)
        self.staged_outputs.ensure(outputs.size)

    @property
    def busy(self) -> bool:
        """Whether a batch still needs the memory."""
        return self.pending is not None and not self.pending.done

    def finish(self) -> None:
        """Finish the batch that uses the slot; it keeps its results."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()

    def gpu_ms(self) -> float:
        """The GPU's time for the latest finished batch, in milliseconds."""
        return float(self._device.call("cuEventElapsedTime", self.began, self.computed))

    def release(self) -> None:
        """Free the memory, which no work may use any more."""
        for block in (self.staged_inputs, self.inputs, self.outputs, self.staged_outputs):
            block.release()

    def close(self) -> None:
        """Free the memory and the events."""
        self.release()
        for event in (self.copied_in, self.began, self.computed, self.copied_out):
            self._device.call("cuEventDestroy", event)


class Pipeline:
    """Two batches in flight: copies of one, on streams of their own, overlap with computing the other.

    The GPU's context must be current in every call.

    Attributes:
        copying_in: stream of the copies to the device.
        computing: stream of the model.
        copying_out: stream of the copies from the device.
        slots: two, used alternately.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.copying_in, self.computing, self.copying_out = (
            device.call("cuStreamCreate", _NON_BLOCKING) for _ in range(3)
        )
        self.slots = (Slot(device), Slot(device))

    def settle(self) -> None:
        """Wait for all enqueued work."""
        for stream in (self.copying_in, self.computing, self.copying_out):
            self._device.call("cuStreamSynchronize", stream)

    def release(self) -> None:
        """Free the buffers of slots without a batch; nothing is enqueued."""
        for slot in self.slots:
            if not slot.busy:
                slot.release()

    def close(self) -> None:
        """Free everything; no slot may be in use, and nothing is enqueued."""
        for slot in self.slots:
            slot.close()
        for stream in (self.copying_in, self.computing, self.copying_out):
            self._device.call("cuStreamDestroy", stream)
