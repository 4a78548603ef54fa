"""A simulated TensorRT: its engines hold ONNX graphs, which ONNX Runtime runs in the memory of a simulated GPU.

It refuses calls that TensorRT forbids, and writes NaN where TensorRT leaves values undefined: outputs before they are
computed, results from shared scratch memory, graphs whose execution context has changed. Plugins, loggers and
enumerations are TensorRT-RTX's own.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime

from fakes.simulated_device import SimulatedDevice
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import ProfileShape
from hdruntime.bundle.reader import Bundle, open_bundle
from support.tiny_bundle import engine_file

try:
    import tensorrt_rtx as real
except ImportError:
    from fakes import bare_tensorrt as real

_MAGIC = b"simulated engine "
_ALIGNMENT = 256
_NUMPY = {"INT64": np.int64, "INT32": np.int32, "FLOAT": np.float32, "HALF": np.float16}
_REAL = (
    "IPlugin", "PluginField", "ILogger", "DataType", "TensorIOMode", "EngineStat", "ExecutionContextAllocationStrategy",
    "CudaGraphStrategy", "DynamicShapesKernelSpecializationStrategy",
)  # fmt: skip
"""Prefixes of names from TensorRT-RTX itself: our plugins' base classes, and enumerations; of `bare_tensorrt`, where it
is missing."""

CACHE_MAGIC = b"simulated cache "


def simulated_engine(
    model: bytes, profiles: Sequence[ProfileShape], *, input_type: str = "INT64", output_type: str = "FLOAT"
) -> bytes:
    """An engine's file: its ONNX graph and its profiles; the types replace int64 and float."""
    described = {
        "model": base64.b64encode(model).decode(),
        "profiles": [
            [list(axis) for axis in (profile.batch, profile.tokens, profile.memory or (0, 0, 0))]
            for profile in profiles
        ],
        "input_type": input_type,
        "output_type": output_type,
    }
    return _MAGIC + json.dumps(described).encode()


class SimulatedTensorRt(ModuleType):
    """The module of a variant.

    Args:
        device: the GPU.
        variant: the module's name.

    Attributes:
        trouble: what fails -> TensorRT's message: "deserialize", "context", "profile" (which raises, as the bindings
            do), "shape", "size" of scratch memory (which is 0 then), "enqueue", "capture" (enqueueing
            during a capture), "uncapturable" (contexts say that their streams cannot be captured).
        living: the living execution contexts that must be destroyed.
        made: number of execution contexts ever made.
        caches: runtime caches, in order of creation.
        scratch_bytes: scratch memory per token.
        weights_bytes: weights of every engine.
        shapes_run: the shapes (batch, tokens), or (batch, tokens, memory), of all enqueued batches, in order.
    """

    __version__ = "9.9.9"

    def __init__(self, device: SimulatedDevice, variant: str) -> None:
        super().__init__(variant)
        self.device = device
        self.trouble: dict[str, str] = {}
        self.living: weakref.WeakSet[IExecutionContext] = weakref.WeakSet()
        self.made = 0
        self.caches: list[IRuntimeCache] = []
        self.scratch_bytes = 64
        self.weights_bytes = 12345
        self.shapes_run: list[tuple[int, ...]] = []
        self._registry = PluginRegistry()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_REAL):
            return getattr(real, name)
        raise AttributeError(name)

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    def get_plugin_registry(self) -> PluginRegistry:
        return self._registry

    def enqueue(self, stream: int, context: Any, engine: ICudaEngine, bound: Bound) -> None:
        """Put an engine's kernels on a stream. They use the scratch memory from the first to the last."""
        for kernel in (_fill_scratch, _compute):
            self.device.later(stream, lambda kernel=kernel: kernel(self.device, context, engine, bound))


class PluginRegistry:
    """Accepts all creators; one per simulated module, where the real one is one per process."""

    def __init__(self) -> None:
        self._creators: list[Any] = []

    def register_creator(self, creator: Any, plugin_namespace: str) -> bool:
        self._creators.append(creator)
        return True


class Runtime:
    def __init__(self, trt: SimulatedTensorRt, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        if "deserialize" in self._trt.trouble or not serialized_engine.startswith(_MAGIC):
            return self._refuse(self._trt.trouble.get("deserialize", "the magic number differs"))
        return ICudaEngine(self._trt, self, json.loads(serialized_engine[len(_MAGIC) :]))

    def _refuse(self, message: str) -> None:
        self._logger.log(real.ILogger.Severity.ERROR, message)


class ICudaEngine:
    def __init__(self, trt: SimulatedTensorRt, runtime: Runtime, described: dict[str, Any]) -> None:
        self._trt, self._runtime = trt, runtime
        self._profiles = described["profiles"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self._session = onnxruntime.InferenceSession(
            base64.b64decode(described["model"]), options, providers=["CPUExecutionProvider"]
        )
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        of_input = {"tensor(int64)": described["input_type"], "tensor(float)": "FLOAT"}
        self._types = {item.name: of_input[item.type] for item in inputs}
        self._types |= {item.name: described["output_type"] for item in outputs}
        self._inputs = [item.name for item in inputs]
        self._axes = {item.name: item.shape for item in (*inputs, *outputs)}

    @property
    def num_io_tensors(self) -> int:
        return len(self._types)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._types)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self._trt.TensorIOMode.INPUT if name in self._inputs else self._trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(self._trt.DataType, self._types[name])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [self._shape_of(name, *sizes) for sizes in zip(*self._profiles[profile_index], strict=True)]

    def _shape_of(self, name: str, batch: int, tokens: int, memory: int = 0) -> tuple[int, ...]:
        sizes = {"batch": batch, "tokens": tokens, "memory": memory}
        return tuple(sizes.get(axis, axis) for axis in self._axes[name])

    def get_engine_stat(self, stat: Any) -> int:
        return self._trt.weights_bytes if stat == self._trt.EngineStat.TOTAL_WEIGHTS_SIZE else -1

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig(self._trt) if self._trt.__name__ == "tensorrt_rtx" else PlainRuntimeConfig()

    def create_execution_context(self, runtime_config: PlainRuntimeConfig) -> IExecutionContext | None:
        if "context" in self._trt.trouble:
            return self._runtime._refuse(self._trt.trouble["context"])
        kind = RtxExecutionContext if isinstance(runtime_config, IRuntimeConfig) else IExecutionContext
        return kind(self._trt, self, runtime_config)


class PlainRuntimeConfig:
    """TensorRT's part."""

    _strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy


class IRuntimeConfig(PlainRuntimeConfig):
    """TensorRT-RTX's part."""

    dynamic_shapes_kernel_specialization_strategy = cuda_graph_strategy = None

    def __init__(self, trt: SimulatedTensorRt) -> None:
        self._trt = trt
        self._cache: IRuntimeCache | None = None

    def create_runtime_cache(self) -> IRuntimeCache:
        self._trt.caches.append(IRuntimeCache())
        return self._trt.caches[-1]

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True


class IRuntimeCache:
    """The shapes with compiled kernels."""

    def __init__(self) -> None:
        self._content: set[str] = set()

    def serialize(self) -> bytearray:
        return bytearray(CACHE_MAGIC + json.dumps(sorted(self._content)).encode())

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(CACHE_MAGIC):
            return False
        self._content = set(json.loads(blob[len(CACHE_MAGIC) :]))
        return True


@dataclass(frozen=True)
class Bound:
    """A context's settings when a batch was enqueued; `version` is that of a captured one, which must not change."""

    shape: tuple[int, ...]
    addresses: dict[str, int]
    scratch: tuple[int, int]
    version: int | None


@dataclass
class State:
    profile: int | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    scratch: tuple[int, int] = (0, 0)
    needed: int | None = None
    flushed: bool = False


class IExecutionContext:
    """A context with the caller's memory."""

    def __init__(self, trt: SimulatedTensorRt, engine: ICudaEngine, config: PlainRuntimeConfig) -> None:
        assert config._strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._trt, self._engine, self._config = trt, engine, config
        self._state, self._version = State(), 0
        trt.made += 1
        trt.living.add(self)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if "profile" in self._trt.trouble:
            self._refuse(self._trt.trouble["profile"])
            raise RuntimeError("Error in set optimization profile async.")
        self._state = State(profile=profile_index)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._state.profile)
        fits = len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
        if "shape" in self._trt.trouble or not fits:
            reason = f"shape {shape} of {name} is outside of profile {self._state.profile}"
            return self._refuse(self._trt.trouble.get("shape", reason))
        if self._state.shapes.get(name) != shape:
            self._state.shapes[name] = shape
            self._state.needed, self._state.flushed = None, False
            self._version += 1
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._engine._shape_of(name, *self._shape())

    def update_device_memory_size_for_shapes(self) -> int:
        if "size" in self._trt.trouble:
            self._refuse(self._trt.trouble["size"])
            return 0
        batch, tokens, *_ = self._shape()
        self._state.needed = self._trt.scratch_bytes * batch * tokens + 1000 * self._state.profile
        return self._state.needed

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % _ALIGNMENT == 0
        if self._state.scratch != (memory, size):
            self._version += 1
        self._state.scratch = (memory, size)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory % _ALIGNMENT or not memory:
            return self._refuse(f"{memory:#x} is not aligned")
        if self._state.addresses.get(name) != memory:
            self._version += 1
        self._state.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if "enqueue" in self._trt.trouble:
            self._state.needed = None  # the state of its memory is unknown
            return self._refuse(self._trt.trouble["enqueue"])
        state, device = self._state, self._trt.device
        if state.needed is None or state.scratch[1] < state.needed:
            return self._refuse(f"scratch memory of {state.scratch[1]} bytes, needed are {state.needed}")
        if set(state.addresses) != set(self._engine._types):
            return self._refuse("not every tensor has an address")
        captured = device.capturing(stream_handle)
        if captured is not None and ("capture" in self._trt.trouble or not state.flushed):
            captured.invalid = True
            return self._refuse("operation not permitted when stream is capturing")
        state.flushed = True
        self._trt.shapes_run.append(self._shape())
        if (cache := getattr(self._config, "_cache", None)) is not None:
            cache._content.add("x".join(map(str, self._shape())))
        version = self._version if captured is not None else None
        bound = Bound(self._shape(), dict(state.addresses), (state.scratch[0], state.needed), version)
        self._trt.enqueue(stream_handle, weakref.ref(self), self._engine, bound)
        return True

    def _shape(self) -> tuple[int, ...]:
        axes, shapes = self._engine._axes, self._state.shapes
        (shape,) = {shapes[name] for name in self._engine._inputs if "tokens" in axes[name]}
        memory = {shapes[name][1] for name in self._engine._inputs if "memory" in axes[name]}
        assert len(memory) < 2, f"axes `memory` of sizes {memory}"
        shape = (*shape, *memory)
        assert self._state.shapes == {name: self._engine._shape_of(name, *shape) for name in self._engine._inputs}
        return shape

    def _refuse(self, message: str) -> bool:
        self._engine._runtime._refuse(message)
        return False


class RtxExecutionContext(IExecutionContext):
    """TensorRT-RTX's additional method.

    A context that compiles in the background must not be destroyed: the destruction holds Python's lock and waits for
    threads that need the lock to log.
    """

    def __init__(self, trt: SimulatedTensorRt, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        super().__init__(trt, engine, config)
        if config.dynamic_shapes_kernel_specialization_strategy == trt.DynamicShapesKernelSpecializationStrategy.LAZY:
            trt.living.discard(self)
            fault = "a context was destroyed while its threads may log"
            weakref.finalize(self, trt.device.faults.append, fault).atexit = False

    def is_stream_capturable(self, stream: int) -> bool:
        return "uncapturable" not in self._trt.trouble


def _pattern(bound: Bound) -> np.ndarray:
    # Another batch in this memory has another number.
    return np.full(bound.scratch[1], 1 + id(bound) // 16 % 251, np.uint8)


def _fill_scratch(device: SimulatedDevice, context: Any, engine: ICudaEngine, bound: Bound) -> None:
    device.bytes_at(*bound.scratch)[:] = _pattern(bound)


def _compute(device: SimulatedDevice, context: Any, engine: ICudaEngine, bound: Bound) -> None:
    alive = context()
    right = np.array_equal(device.bytes_at(*bound.scratch), _pattern(bound))
    right &= alive is not None and bound.version in (None, alive._version)
    feed = {}
    for name in engine._inputs:
        dtype = np.dtype(_NUMPY[engine._types[name]])
        shape = engine._shape_of(name, *bound.shape)
        values = device.bytes_at(bound.addresses[name], math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
        feed[name] = values.copy() if dtype == np.float32 else values.astype(np.int64)
    names = [item.name for item in engine._session.get_outputs()]
    try:
        answers = engine._session.run(names, feed)
    except Exception as error:  # ids from memory without content are outside the vocabulary
        device.faults.append(f"the inputs are invalid: {str(error)[:80]}")
        right, answers = False, []
    for name, values in zip(names, answers, strict=False):
        written = values if right else np.full_like(values, np.nan)
        device.bytes_at(bound.addresses[name], values.nbytes)[:] = np.frombuffer(written.tobytes(), np.uint8)


def add_engine(
    bundle: Path,
    profiles: Sequence[ProfileShape],
    *,
    variant: str = "tensorrt",
    max_len: int = 512,
    types: Mapping[str, str] | None = None,
    **changes: Any,
) -> Bundle:
    """Give a bundle of `support.tiny_bundle` a simulated engine, in place of any other, and room for longer texts.

    Args:
        bundle: its directory.
        profiles: of the engine.
        variant: of the engine.
        max_len: of the bundle.
        types: options of `simulated_engine`.
        changes: other fields of the engine in the manifest.
    """
    manifest = open_bundle(bundle).manifest
    made_for = {"variant": variant, "version": "9.9.9", "architectures": ("sm86",), "profiles": tuple(profiles)}
    listed = engine_file(variant, **made_for)
    (bundle / "engines").mkdir(exist_ok=True)
    model = onnx.load(bundle / "model.onnx")  # with weights that lie beside it
    (bundle / listed.file).write_bytes(simulated_engine(model.SerializeToString(), profiles, **(types or {})))
    built_on = {"platform": "Linux", "driver": None, "gpu": None, "date": "2026-11-21"}
    metadata = {"plugins": {}, "engine_sha256": "", "onnx_sha256": {}, "built_on": built_on}
    (bundle / listed.metadata).write_text(json.dumps(metadata))
    engines = (dataclasses.replace(listed, **changes),)
    positions = dataclasses.replace(manifest.positions, rows=max_len)
    changed = dataclasses.replace(manifest, engines=engines, max_len=max_len, positions=positions)
    return Bundle(bundle, seal(bundle, changed))
