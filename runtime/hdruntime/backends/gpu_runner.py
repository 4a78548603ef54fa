"""Runners on an NVIDIA GPU: what backends share of `hdruntime.backends.DeviceRunner`."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hdruntime.arrays import Inputs, IntArray, Outputs
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, Manifest
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.gpu.batches import Batches
from hdruntime.gpu.cuda import Device, open_device
from hdruntime.gpu.device_arrays import DeviceArray
from hdruntime.gpu.device_inputs import device_inputs, size_of_memory
from hdruntime.gpu.device_states import DeviceStates
from hdruntime.gpu.model import DeviceModel
from hdruntime.gpu.slots import PendingBatch, Pipeline, Slot

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=DeviceModel)
Result = TypeVar("Result")


class GpuRunner(Generic[Model]):
    """Batches of a model on a GPU; see `hdruntime.backends.DeviceRunner`, also for threads.

    A batch is padded to a shape that the model accepts; copies of one batch overlap with computing another.

    Args:
        number: the GPU's.
        open_model: loads the model in the GPU's context, for a stream to compute on.
    """

    backend: Backend
    precision = Precision.AUTO
    batch_tokens = 16384
    """The value of text-embeddings-inference; not measured on a GPU yet."""
    max_in_flight = 2

    def __init__(self, manifest: Manifest, number: int, open_model: Callable[[Device, Any], Model]) -> None:
        self._manifest, self.max_len = manifest, manifest.max_len
        self._lock = threading.Lock()
        self._turn = 0
        self._closed = False
        self._device = open_device(number)
        with self._device.current():
            pipeline = Pipeline(self._device)
            try:
                self._model = open_model(self._device, pipeline.computing)
            except BaseException:
                pipeline.close()
                raise
        self._pipeline: Pipeline | None = pipeline
        tokenizer, self._mask = manifest.tokenizer, manifest.mask
        fill = {manifest.ids: tokenizer.pad_token_id} if tokenizer else {}
        self._batches = Batches(self._device, self._model, pipeline, mask=self._mask, fill=fill)
        self._memory_caches = [spec.name for spec in manifest.recurrent_states if spec.has_memory_axis]

    def engine_bytes(self) -> int | None:
        """Not reported; see :class:`hdruntime.backends.DeviceRunner`."""
        return None

    def max_padding(self, tokens: int) -> int:
        """No limit; see :class:`hdruntime.backends.Runner`."""
        return sys.maxsize

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Tokens of the shape that the batch is padded to; see :class:`hdruntime.backends.Runner`."""
        shape = self._model.choose(*attention_mask.shape).shape
        return shape.batch * shape.tokens

    def start(self, inputs: Inputs, outputs: Sequence[str]) -> Callable[[], Outputs]:
        """Begin a batch; see :class:`hdruntime.backends.Runner`. One that the model does not accept is an
        InputError."""
        memory = next((inputs[name].shape[1] for name in self._memory_caches), 0)
        return self._start(inputs, outputs, memory=memory)

    def open_states(self, rows: int) -> GpuStates:
        """States on the GPU; see :class:`hdruntime.backends.Runner`."""
        with self._slot() as (pipeline, _):
            states = DeviceStates(self._device, self._manifest, pipeline.computing, rows=rows)
        return GpuStates(self, states)

    def start_on_device(self, inputs: Mapping[str, object], outputs: Sequence[str]) -> dict[str, DeviceArray]:
        """Begin a batch that is in GPU memory, and leave its results there; see `Session.run_on_device`."""
        with self._slot() as (pipeline, slot):
            specs = {name: spec for name, (spec, _) in self._model.inputs.items()}
            with device_inputs(inputs, specs, self._device, pipeline.copying_in) as arrays:
                choice = self._model.choose(*arrays[self._mask].shape, memory=size_of_memory(arrays, specs))
                results, wait = self._with_memory(
                    pipeline, lambda: self._batches.start_on_device(slot, choice, arrays, list(outputs))
                )
            slot.pending = PendingBatch(wait)
        return results

    def close(self) -> None:
        """Free memory; later starts, and requests for results, raise BackendError. May be repeated."""
        with self._lock:
            self._closed = True
            pipeline, self._pipeline = self._pipeline, None
            if pipeline is None:
                return
            for slot in pipeline.slots:
                slot.finish()
            try:
                with self._device.current(), contextlib.ExitStack() as stack:
                    # The model's streams outlive it.
                    stack.callback(pipeline.close)
                    stack.callback(self._model.close)
                    pipeline.settle()
            except BackendError as error:
                logger.warning("some GPU memory could not be freed: %s", error)

    def _start(
        self, inputs: Inputs, outputs: Sequence[str], *, memory: int, states: DeviceStates | None = None
    ) -> Callable[[], Outputs]:
        choice = self._model.choose(*inputs[self._mask].shape, memory=memory)
        with self._slot() as (pipeline, slot):
            collect = self._with_memory(
                pipeline, lambda: self._batches.start(slot, choice, inputs, list(outputs), states=states)
            )
            slot.pending = pending = PendingBatch(collect)
        return lambda: self._results(pending)

    def _results(self, pending: PendingBatch) -> Outputs:
        results = pending.results()
        if self._closed:
            raise closed_error()
        return results

    @contextlib.contextmanager
    def _slot(self) -> Iterator[tuple[Pipeline, Slot]]:
        """The next slot, free; after an error no work uses it any more."""
        with self._lock:
            if self._pipeline is None:
                raise closed_error()
            pipeline, slot = self._pipeline, self._pipeline.slots[self._turn]
            self._turn = (self._turn + 1) % len(pipeline.slots)
            slot.finish()
            with self._device.current():
                try:
                    yield pipeline, slot
                except BaseException:
                    with contextlib.suppress(BackendError):
                        pipeline.settle()
                    raise

    def _with_memory(self, pipeline: Pipeline, begin: Callable[[], Result]) -> Result:
        """Begin a batch; if memory is short, retry once after freeing what earlier batches left."""
        try:
            return begin()
        except OutOfMemoryError as error:
            logger.info("memory is short; freeing buffers and graphs: %s", error)
        # Not while the error is handled: its traceback keeps earlier allocations alive.
        pipeline.settle()
        self._model.release()
        pipeline.release()
        return begin()


class GpuStates:
    """The recurrent states of some rows on a GPU; see `hdruntime.backends.RecurrentStates`."""

    def __init__(self, runner: GpuRunner[Any], states: DeviceStates) -> None:
        self._runner, self._states = runner, states

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run one segment of each row; see `hdruntime.backends.RecurrentStates.run`."""
        return self._runner._start(inputs, outputs, memory=self._states.tokens, states=self._states)()

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """See `hdruntime.backends.RecurrentStates.computed_tokens`."""
        return self._runner.computed_tokens(attention_mask)

    def reset(self, rows: Sequence[int]) -> None:
        """Reset the states of rows; see `hdruntime.backends.RecurrentStates.reset`."""
        with self._runner._slot():
            self._states.reset(rows)


def closed_error() -> BackendError:
    """The error of a batch for a runner that was closed."""
    return BackendError("The session is closed; load the bundle again.")
