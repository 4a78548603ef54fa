"""Engines of TensorRT's flavours behind the interface of `hdruntime.backends.Runner`."""

from __future__ import annotations

__all__ = ["TensorRtRunner"]

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hdruntime.backends.tensorrt.batches import Batches
from hdruntime.backends.tensorrt.device_inputs import device_inputs
from hdruntime.backends.tensorrt.engine import KernelSpecialization, load_engine
from hdruntime.backends.tensorrt.graph_policy import GraphMode, GraphPolicy
from hdruntime.backends.tensorrt.machine import Machine
from hdruntime.backends.tensorrt.options import checked_options
from hdruntime.backends.tensorrt.runtime_cache import RuntimeCacheFile
from hdruntime.backends.tensorrt.shapes import Choice, check_limits, choose_profile, longest, most_rows
from hdruntime.backends.tensorrt.slots import FloatArrays, Pending, Slot
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.padding_limit import padding_limit
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.gpu.cuda import open_device
from hdruntime.gpu.device_arrays import DeviceArray
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.gpu.options import GpuOptions

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 60.0
"""Between two writes of TensorRT-RTX's runtime cache while new shapes come; a killed process loses no more."""

Result = TypeVar("Result")


class TensorRtRunner:
    """An engine on a GPU; see `hdruntime.backends.Runner` for what it does, and for threads.

    A batch is padded to a shape that a profile takes; copies of one batch overlap with computing another.

    Args:
        bundle: it lists the engine, and its kernels are what our plugins launch.
        engine: one that this machine can run (`hdruntime.bundle.passport.differences`).
        backend: what runs it; None for the flavour that built it. ``Backend.TENSORRT_LEAN`` runs version-compatible
            engines.
        device: number of the GPU among those that CUDA offers.
        graphs: when CUDA graphs are used.
        most_graphs: graphs that are kept, 1 or more.
        kernel_specialization: of TensorRT-RTX; None for its default, ``lazy``, with which there are no graphs.

    Raises:
        InputError: options contradict each other.
        MissingDependencyError: the flavour's package is not installed.
        BackendUnavailableError: cuda-python, the driver or the GPU is missing; or the engine would pad some batches so
            far that their answers change.
        BackendError: TensorRT refuses the engine.
        OutOfMemoryError: there is too little memory for it.
        BundleCorruptError: the engine is not what the manifest says.
    """

    prefers_equal_lengths = False
    batch_tokens = 16384
    """As text-embeddings-inference has it; not measured on a GPU yet."""
    most_in_flight = 2

    def __init__(
        self,
        bundle: Bundle,
        engine: EngineFile,
        *,
        backend: Backend | None = None,
        device: int = GpuOptions.device,
        graphs: GraphMode | str = GpuOptions.graphs,
        most_graphs: int = GpuOptions.most_graphs,
        kernel_specialization: KernelSpecialization | str | None = GpuOptions.kernel_specialization,
    ) -> None:
        self.backend = backend or Backend(engine.flavour)
        mode, specialization = checked_options(self.backend, graphs, most_graphs, kernel_specialization)
        self.max_len = min(bundle.manifest.max_len, longest(engine.profiles))
        self._profiles = engine.profiles
        self._limit = functools.partial(padding_limit, bundle.manifest.padding)
        check_limits(self._profiles, self._limit)
        self._lock = threading.Lock()
        self._turn = 0
        self._closed = False
        self._device = open_device(device)
        with self._device.current():
            self._cache_file = self._runtime_cache_file(bundle, engine)
            cached = self._cache_file.read() if self._cache_file else None
            self._loaded = load_engine(bundle, engine, self.backend, specialization=specialization, cached=cached)
            policy = GraphPolicy(mode)
            machine = Machine(self._device, self._loaded, policy, most_graphs=most_graphs)
        tokenizer, self._mask = bundle.manifest.tokenizer, bundle.manifest.mask
        fill = {bundle.manifest.ids: tokenizer.pad_token_id} if tokenizer else {}
        self._batches = Batches(self._device, self._loaded, machine, policy, mask=self._mask, fill=fill)
        self._machine: Machine | None = machine
        self._shapes_unsaved = False
        self._shapes: set[Choice] = set()
        self._saved = time.monotonic()
        logger.info("%s runs %s on GPU %d", self.backend.value, engine.file, device)

    def engine_bytes(self) -> int | None:
        """Weights and scratch memory on the GPU; see :class:`hdruntime.backends.DeviceRunner`."""
        with self._lock:
            if self._machine is None:
                raise _closed_error()
            weights_bytes = self._loaded.weights_bytes
            return None if weights_bytes is None else weights_bytes + self._machine.scratch_bytes

    def most_rows(self, tokens: int) -> int:
        """Rows that a batch of that length may have; 0 for more tokens than any profile takes."""
        return most_rows(self._profiles, tokens, limit=self._limit(tokens))

    def computed_tokens(self, attention_mask: npt.NDArray[np.int64]) -> int:
        """Those of the shape that the batch is padded to; see :class:`hdruntime.backends.Runner`."""
        shape = self._choice(*attention_mask.shape).shape
        return shape.batch * shape.tokens

    def start(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str]
    ) -> Callable[[], dict[str, npt.NDArray[np.float32]]]:
        """Begin a batch; see :class:`hdruntime.backends.Runner`.

        Raises:
            InputError: no profile takes so many rows or tokens.
        """
        choice = self._choice(*inputs[self._mask].shape)
        with self._slot() as (machine, slot):
            collect = self._with_memory(machine, lambda: self._batches.start(slot, choice, inputs, list(outputs)))
            slot.pending = pending = Pending(collect)
            self._note_shape(choice)
        return lambda: self._results(pending)

    def start_on_device(self, inputs: Mapping[str, object], outputs: Sequence[str]) -> dict[str, DeviceArray]:
        """Begin a batch that is in the memory of the GPU, and whose results stay there.

        Nothing waits for the results but their consumers: see :class:`hdruntime.gpu.device_arrays.DeviceArray`. What
        only values tell is not checked: ids outside of the vocabulary, NaN in results.

        Args:
            inputs: every input of the manifest, contiguous, of its shape, int64 or int32 or, of a memory, float32, with
                ``__dlpack__`` or ``__cuda_array_interface__``, on the engine's GPU. They have been read when this
                returns.
            outputs: names of the outputs wanted.

        Returns:
            name -> array of the shape in the manifest. Padded positions of a tokens axis hold 0.

        Raises:
            InputError: an input does not fit.
            BackendError: the backend failed, or is closed.
            OutOfMemoryError: memory was short, and a smaller batch may fit.
        """
        with self._slot() as (machine, slot):
            specs = {name: spec for name, (spec, _) in self._loaded.inputs.items()}
            with device_inputs(inputs, specs, self._device, machine.copying_in) as arrays:
                choice = self._choice(*arrays[self._mask].shape)
                results, wait = self._with_memory(
                    machine, lambda: self._batches.start_on_device(slot, choice, arrays, list(outputs))
                )
            slot.pending = Pending(wait)
            self._note_shape(choice)
        return results

    def close(self) -> None:
        """Free memory. What is started, or asked for its results, afterwards raises BackendError. May be repeated."""
        with self._lock:
            self._closed = True
            machine, self._machine = self._machine, None
            if machine is None:
                return
            for slot in machine.slots:
                slot.finish()
            try:
                with self._device.current():
                    try:
                        self._save_cache()
                        machine.close()
                    finally:
                        self._loaded.close()
            except BackendError as error:
                logger.warning("not all memory of the GPU could be given back: %s", error)

    def _choice(self, batch: int, tokens: int) -> Choice:
        return choose_profile(self._profiles, batch, tokens, limit=self._limit(tokens))

    def _results(self, pending: Pending) -> FloatArrays:
        results = pending.results()
        if self._closed:
            raise _closed_error()
        return results

    @contextlib.contextmanager
    def _slot(self) -> Iterator[tuple[Machine, Slot]]:
        """The next slot, free; after an error nothing uses it any more."""
        with self._lock:
            if self._machine is None:
                raise _closed_error()
            machine, slot = self._machine, self._machine.slots[self._turn]
            self._turn = (self._turn + 1) % len(machine.slots)
            slot.finish()
            with self._device.current():
                try:
                    yield machine, slot
                except BaseException:
                    with contextlib.suppress(BackendError):
                        machine.settle()
                    raise

    def _with_memory(self, machine: Machine, begin: Callable[[], Result]) -> Result:
        """Begin a batch; where memory is short, once more without what earlier batches left behind."""
        try:
            return begin()
        except OutOfMemoryError as error:
            logger.info("memory is short, so that buffers and graphs are given back: %s", error)
        # Not while the error is handled: its traceback holds what was allocated before it.
        machine.release()
        return begin()

    def _runtime_cache_file(self, bundle: Bundle, engine: EngineFile) -> RuntimeCacheFile | None:
        if self.backend is not Backend.TENSORRT_RTX:
            return None
        gpu = gpus()[self._device.ordinal : self._device.ordinal + 1]
        here = (gpu[0].name, gpu[0].architecture) if gpu else ()
        sha256 = bundle.manifest.files[engine.file].sha256
        identity = (sha256, engine.version, driver_version() or "", *here)
        return RuntimeCacheFile(bundle.file(engine.file), identity)

    def _note_shape(self, choice: Choice) -> None:
        if self._cache_file is None:
            return
        self._shapes_unsaved |= choice not in self._shapes
        self._shapes.add(choice)
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self._save_cache()

    def _save_cache(self) -> None:
        if self._cache_file is None or not self._shapes_unsaved:
            return
        self._cache_file.write(bytes(memoryview(self._loaded.cache.serialize())))
        self._shapes_unsaved, self._saved = False, time.monotonic()


def _closed_error() -> BackendError:
    return BackendError("The session is closed; load the bundle again.")
