"""Engines of TensorRT's flavours behind the interface of `hdruntime.backends.Runner`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from hdruntime.arrays import Inputs, IntArray, Outputs
from hdruntime.backends.precision import Precision
from hdruntime.backends.tensorrt.batches import Batches
from hdruntime.backends.tensorrt.engine import KernelSpecialization, load_engine
from hdruntime.backends.tensorrt.graph_policy import GraphMode, GraphPolicy
from hdruntime.backends.tensorrt.machine import Machine
from hdruntime.backends.tensorrt.runtime_cache import RuntimeCacheFile
from hdruntime.backends.tensorrt.shapes import ShapeChoice, check_limits, choose_profile, longest, most_rows
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, InputError, OutOfMemoryError
from hdruntime.gpu.carried import Carried
from hdruntime.gpu.cuda import open_device
from hdruntime.gpu.device_arrays import DeviceArray
from hdruntime.gpu.device_inputs import device_inputs, size_of_memory
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.gpu.options import GpuOptions
from hdruntime.gpu.slots import PendingBatch, Slot
from hdruntime.text.checks import checked_choice

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 60.0
"""Between two writes of TensorRT-RTX's runtime cache while new shapes arrive; a killed process loses no more."""

Result = TypeVar("Result")


class TensorRtRunner:
    """An engine on a GPU; see `hdruntime.backends.Runner`, also for threads.

    A batch is padded to a shape that a profile accepts; copies of one batch overlap with computing another. The engine
    is one that this machine can run; the backend is the flavour that built it, or ``Backend.TENSORRT_LEAN`` for
    version-compatible engines. An engine that would pad some batches so far that their answers change is refused.
    """

    precision = Precision.AUTO
    prefers_equal_lengths = False
    batch_tokens = 16384
    """The value of text-embeddings-inference; not measured on a GPU yet."""
    most_in_flight = 2

    def __init__(self, bundle: Bundle, engine: EngineFile, *, backend: Backend, gpu: GpuOptions) -> None:
        self.backend = backend
        mode, specialization = _checked_options(backend, gpu)
        self.max_len = min(bundle.manifest.max_len, longest(engine.profiles))
        self._profiles = engine.profiles
        self._limit = bundle.manifest.padding_limit
        check_limits(self._profiles, self._limit)
        self._lock = threading.Lock()
        self._turn = 0
        self._closed = False
        self._device = open_device(gpu.device)
        with self._device.current():
            self._cache_file = self._runtime_cache_file(bundle, engine)
            cached = self._cache_file.read() if self._cache_file else None
            self._loaded = load_engine(bundle, engine, self.backend, specialization=specialization, cached=cached)
            policy = GraphPolicy(mode)
            machine = Machine(self._device, self._loaded, policy, most_graphs=gpu.most_graphs)
        self._manifest = bundle.manifest
        self._carried = [spec.name for spec in bundle.manifest.memories if spec.has_memory_axis]
        tokenizer, self._mask = bundle.manifest.tokenizer, bundle.manifest.mask
        fill = {bundle.manifest.ids: tokenizer.pad_token_id} if tokenizer else {}
        self._batches = Batches(self._device, self._loaded, machine, policy, mask=self._mask, fill=fill)
        self._machine: Machine | None = machine
        self._shapes_unsaved = False
        self._shapes: set[ShapeChoice] = set()
        self._saved = time.monotonic()
        logger.info("%s runs %s on GPU %d", self.backend.value, engine.file, gpu.device)

    def engine_bytes(self) -> int | None:
        """Weights and scratch memory on the GPU; see :class:`hdruntime.backends.DeviceRunner`."""
        with self._lock:
            if self._machine is None:
                raise _closed_error()
            weights_bytes = self._loaded.weights_bytes
            return None if weights_bytes is None else weights_bytes + self._machine.scratch_bytes

    def most_rows(self, tokens: int) -> int:
        """Most rows of a batch of this length; 0 if no profile accepts the length."""
        return most_rows(self._profiles, tokens, limit=self._limit(tokens))

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Tokens of the shape that the batch is padded to; see :class:`hdruntime.backends.Runner`."""
        shape = self._choice(*attention_mask.shape).shape
        return shape.batch * shape.tokens

    def start(self, inputs: Inputs, outputs: Sequence[str]) -> Callable[[], Outputs]:
        """Begin a batch; see :class:`hdruntime.backends.Runner`. Rows or tokens that no profile accepts are an
        InputError."""
        memory = next((inputs[name].shape[1] for name in self._carried), 0)
        return self._start(inputs, outputs, memory=memory)

    def open_states(self, rows: int) -> EngineStates:
        """Memories on the GPU; see :class:`hdruntime.backends.Runner`."""
        with self._slot() as (machine, _):
            carried = Carried(self._device, self._manifest, machine.computing, rows=rows)
        return EngineStates(self, carried)

    def start_on_device(self, inputs: Mapping[str, object], outputs: Sequence[str]) -> dict[str, DeviceArray]:
        """Begin a batch that is in GPU memory, and leave its results there; see `Session.run_on_device`."""
        with self._slot() as (machine, slot):
            specs = {name: spec for name, (spec, _) in self._loaded.inputs.items()}
            with device_inputs(inputs, specs, self._device, machine.copying_in) as arrays:
                choice = self._choice(*arrays[self._mask].shape, memory=size_of_memory(arrays, specs))
                results, wait = self._with_memory(
                    machine, lambda: self._batches.start_on_device(slot, choice, arrays, list(outputs))
                )
            slot.pending = PendingBatch(wait)
            self._note_shape(choice)
        return results

    def close(self) -> None:
        """Free memory; later starts, and requests for results, raise BackendError. May be repeated."""
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
                logger.warning("some GPU memory could not be freed: %s", error)

    def _choice(self, batch: int, tokens: int, *, memory: int = 0) -> ShapeChoice:
        return choose_profile(self._profiles, batch, tokens, memory=memory, limit=self._limit(tokens))

    def _start(
        self,
        inputs: Inputs,
        outputs: Sequence[str],
        *,
        memory: int,
        carried: Carried | None = None,
    ) -> Callable[[], Outputs]:
        choice = self._choice(*inputs[self._mask].shape, memory=memory)
        with self._slot() as (machine, slot):
            collect = self._with_memory(
                machine, lambda: self._batches.start(slot, choice, inputs, list(outputs), carried=carried)
            )
            slot.pending = pending = PendingBatch(collect)
            self._note_shape(choice)
        return lambda: self._results(pending)

    def _results(self, pending: PendingBatch) -> Outputs:
        results = pending.results()
        if self._closed:
            raise _closed_error()
        return results

    @contextlib.contextmanager
    def _slot(self) -> Iterator[tuple[Machine, Slot]]:
        """The next slot, free; after an error no work uses it any more."""
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
        """Begin a batch; if memory is short, retry once after freeing what earlier batches left."""
        try:
            return begin()
        except OutOfMemoryError as error:
            logger.info("memory is short; freeing buffers and graphs: %s", error)
        # Not while the error is handled: its traceback keeps earlier allocations alive.
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

    def _note_shape(self, choice: ShapeChoice) -> None:
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


def _checked_options(backend: Backend, gpu: GpuOptions) -> tuple[GraphMode, KernelSpecialization]:
    mode = checked_choice(GraphMode, gpu.graphs, option="graphs")
    if gpu.most_graphs < 1:
        raise InputError(f"most_graphs is {gpu.most_graphs}; it must be 1 or more. graphs='off' uses none.")
    if backend is not Backend.TENSORRT_RTX:
        if gpu.kernel_specialization is not None:
            raise InputError(f"kernel_specialization is for tensorrt_rtx, not {backend.value}. Leave it out.")
        return mode, KernelSpecialization.LAZY
    lazy = KernelSpecialization.LAZY
    wanted = checked_choice(KernelSpecialization, gpu.kernel_specialization or lazy, option="kernel_specialization")
    if wanted is not lazy or mode is GraphMode.OFF:
        return mode, wanted
    if mode is GraphMode.ON:
        raise InputError(
            "graphs='on' needs kernel_specialization='eager' or 'none': lazy replaces kernels between runs.\n"
            "Give one of them, or graphs='auto'."
        )
    logger.info(
        "no CUDA graphs: TensorRT-RTX specialises kernels lazily; kernel_specialization eager or none allows them"
    )
    return GraphMode.OFF, wanted


def _closed_error() -> BackendError:
    return BackendError("The session is closed; load the bundle again.")


class EngineStates:
    """The carried states of some rows of an engine; see `hdruntime.backends.CarriedStates`."""

    def __init__(self, runner: TensorRtRunner, carried: Carried) -> None:
        self._runner, self._carried = runner, carried

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run one segment of each row; see `hdruntime.backends.CarriedStates.run`."""
        return self._runner._start(inputs, outputs, memory=self._carried.tokens, carried=self._carried)()

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """See `hdruntime.backends.CarriedStates.computed_tokens`."""
        return self._runner.computed_tokens(attention_mask)

    def reset(self, rows: Sequence[int]) -> None:
        """Forget what rows remember; see `hdruntime.backends.CarriedStates.reset`."""
        with self._runner._slot():
            self._carried.reset(rows)
