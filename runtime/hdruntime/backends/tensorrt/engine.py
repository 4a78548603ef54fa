"""A bundle's engine, deserialised by its variant of TensorRT and checked against the bundle's manifest."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugin_class import take_plugin_errors
from hdplugins.tensorrt.plugins import plugins_with_kernels
from hdruntime.backends.tensorrt.log import TensorRtLog, log_of
from hdruntime.bundle.manifest import Backend, EngineFile, ProfileShape, TensorSpec
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import BackendError, BackendUnavailableError, BundleCorruptError, HdexportError, OutOfMemoryError
from hdruntime.gpu.layout import Layout, Shape, layout_of
from hdruntime.gpu.model import staged_order
from hdruntime.optional import require

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|memoryallocation|bad_alloc", re.IGNORECASE)
"""Words of TensorRT's log for a lack of memory; its calls return only that they failed."""

_DTYPES: dict[str, np.dtype] = {"INT64": np.dtype(np.int64), "INT32": np.dtype(np.int32), "FLOAT": np.dtype(np.float32)}
"""TensorRT's name of a type of inputs and outputs -> NumPy's."""

_TYPES = {"int64": ("INT64", "INT32"), "float32": ("FLOAT",)}
"""Type in the manifest -> accepted types in an engine."""


class KernelSpecialization(StrEnum):
    """When TensorRT-RTX compiles kernels for the exact shape of a batch.

    ``lazy``, its own default, compiles in the background and meanwhile runs general kernels: TensorRT-RTX's own memory,
    the weights most of all, is then kept until the process ends. ``eager`` waits for kernels at the first batch of each
    shape; ``none`` always runs general kernels.
    """

    LAZY = "lazy"
    EAGER = "eager"
    NONE = "none"


@dataclass(kw_only=True)
class LoadedEngine:
    """An engine, ready to create execution contexts.

    Attributes:
        trt: the variant's module.
        config: runtime configuration of execution contexts.
        cache: TensorRT-RTX's runtime cache, else None.
        inputs: name -> axes, and the type in the engine; recurrent states last.
        outputs: name -> axes, and the type: float32.
        keep: TensorRT's objects that must outlive the engine.
        kernels: the bundle's folder with the kernels of hdexport's plugins.
    """

    trt: ModuleType
    engine: Any
    config: Any
    cache: Any
    inputs: Mapping[str, tuple[TensorSpec, np.dtype]]
    outputs: Mapping[str, tuple[TensorSpec, np.dtype]]
    log: TensorRtLog
    keep: tuple[Any, ...]
    kernels: Path

    def new_context(self) -> Any:
        """An execution context; None if TensorRT returns none.

        TensorRT's documentation has it clone the plugins of the engine here. A TensorRT that creates plugins instead
        finds the kernels, too.
        """
        with plugins_with_kernels(self.trt, self.kernels):
            context = self.engine.create_execution_context(self.config)
        strategy = getattr(self.config, "dynamic_shapes_kernel_specialization_strategy", None)
        if getattr(strategy, "name", None) == KernelSpecialization.LAZY.name:
            # Threads of TensorRT-RTX compile for such a context and log what they do, for which the logger needs
            # Python's lock. The bindings hold the lock while they destroy a context (read in those of 1.7.1), which
            # waits for these threads: the process would stand still. A reference that is never given back prevents
            # that the context, or the engine that it refers to, is destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
        return context

    @property
    def weights_bytes(self) -> int | None:
        """Size of the weights on the GPU as reported by TensorRT; None from versions that do not report it."""
        statistic = getattr(self.trt, "EngineStat", None)
        return None if statistic is None else int(self.engine.get_engine_stat(statistic.TOTAL_WEIGHTS_SIZE))

    def layouts(self, shape: Shape) -> tuple[Layout, Layout]:
        """Where the inputs, and the outputs, of a batch of this shape lie in their blocks of memory."""
        return layout_of(self.inputs, shape), layout_of(self.outputs, shape)

    def close(self) -> None:
        """Release TensorRT's objects, even while something (an error's traceback) still refers to this one."""
        self.engine = self.config = self.cache = None
        self.keep = ()

    def error(self, doing: str) -> BackendError:
        """The error with the messages of TensorRT's log and of plugins; calls return only that they failed."""
        return error_of(self.log, doing)

    def logged_error(self, doing: str) -> BackendError | None:
        """What TensorRT logged as an error since it was last asked; None where it logged none."""
        messages = self.log.take_errors()
        return _error(doing, messages) if messages else None

    def plugin_errors(self, doing: str) -> BackendError | None:
        """Errors of hdexport's plugins that TensorRT did not report."""
        complaints = take_plugin_errors()
        return _error(doing, complaints) if complaints else None


def load_engine(
    bundle: Bundle, file: EngineFile, backend: Backend, *, specialization: KernelSpecialization, cached: bytes | None
) -> LoadedEngine:
    """Deserialise an engine in the calling thread's CUDA context; plugins launch the kernels of the bundle's folder.

    `specialization` and `cached`, the content of a runtime cache, are for TensorRT-RTX.

    Raises:
        BackendUnavailableError: the package does not load.
        BackendError: TensorRT rejects the engine.
        OutOfMemoryError: the GPU has too little memory for the engine.
        BundleCorruptError: the engine differs from the manifest.
    """
    trt = _load_variant(backend)
    log, trt_logger = log_of(trt)
    log.take_errors()
    take_plugin_errors()
    doing = f"{backend} {trt.__version__} cannot load {bundle.file(file.file)}"
    runtime = trt.Runtime(trt_logger)
    # Code inside an engine stays disabled (`engine_host_code_allowed`): a bundle is data.
    kernels = bundle.path / KERNELS_FOLDER
    with plugins_with_kernels(trt, kernels):
        engine = runtime.deserialize_cuda_engine(bundle.file(file.file).read_bytes())
    if engine is None:
        raise error_of(log, doing)
    specs = staged_order(bundle.manifest.inputs)
    inputs = _tensors(bundle, engine, trt.TensorIOMode.INPUT, specs)
    outputs = _tensors(bundle, engine, trt.TensorIOMode.OUTPUT, bundle.manifest.outputs)
    _check_profiles(bundle, file, engine)
    config, cache = _runtime_config(trt, engine, backend, specialization, cached)
    return LoadedEngine(
        trt=trt,
        engine=engine,
        config=config,
        cache=cache,
        inputs=inputs,
        outputs=outputs,
        log=log,
        keep=(runtime, trt_logger),
        kernels=kernels,
    )


def error_of(log: TensorRtLog, doing: str) -> BackendError:
    """As :meth:`LoadedEngine.error`, before an engine exists."""
    return _error(doing, (*take_plugin_errors(), *log.take_errors()))


def _error(doing: str, messages: tuple[str, ...]) -> BackendError:
    text = "\n".join(messages) or "it gives no reason; its log may (logging, level INFO)."
    if _OUT_OF_MEMORY.search(text):
        return OutOfMemoryError(f"{doing}, out of memory: {text}", hint="Use smaller batches, or free GPU memory.")
    return BackendError(f"{doing}: {text}", hint="Rebuild the engine for this machine, or use the backend onnxruntime.")


def _load_variant(backend: Backend) -> ModuleType:
    if backend is Backend.TENSORRT_RTX:
        provide_library_link()
    try:
        return require(backend)
    except HdexportError:
        raise
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"The package {backend} is installed but does not load: {error}", hint="See: hdexport doctor"
        ) from error


def _runtime_config(
    trt: ModuleType, engine: Any, backend: Backend, specialization: KernelSpecialization, cached: bytes | None
) -> tuple[Any, Any]:
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if backend is not Backend.TENSORRT_RTX:
        return config, None
    strategies = trt.DynamicShapesKernelSpecializationStrategy
    config.dynamic_shapes_kernel_specialization_strategy = getattr(strategies, specialization.name)
    # It captures its own graphs again whenever an address changes, as ours do between batches; see `graphs`.
    config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
    cache = config.create_runtime_cache()
    if cached is not None and not cache.deserialize(cached):
        logger.warning("TensorRT-RTX does not accept its runtime cache from disk and compiles kernels again")
    config.set_runtime_cache(cache)
    return config, cache


def _tensors(
    bundle: Bundle, engine: Any, mode: Any, specs: Sequence[TensorSpec]
) -> dict[str, tuple[TensorSpec, np.dtype]]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    types = {name: engine.get_tensor_dtype(name).name for name in names if engine.get_tensor_mode(name) == mode}
    if set(types) != {spec.name for spec in specs} or any(types[spec.name] not in _TYPES[spec.dtype] for spec in specs):
        wanted = ", ".join(f"{spec.name} of {' or '.join(_TYPES[spec.dtype])}" for spec in specs)
        raise _differs(bundle, f"tensors {types}", wanted)
    return {spec.name: (spec, _DTYPES[types[spec.name]]) for spec in specs}


def _check_profiles(bundle: Bundle, file: EngineFile, engine: Any) -> None:
    for spec in bundle.manifest.inputs:
        name, wanted = spec.name, [_shapes(spec, profile) for profile in file.profiles]
        shapes = [
            tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, index))
            for index in range(engine.num_optimization_profiles)
        ]
        if shapes != wanted:
            raise _differs(bundle, f"the profiles {shapes} of {name}", str(wanted))


def _shapes(spec: TensorSpec, profile: ProfileShape) -> tuple[tuple[int, ...], ...]:
    """Smallest, best and largest shape of an input."""
    named = {"batch": profile.batch, "tokens": profile.tokens, "memory": profile.memory or (0, 0, 0)}
    axes = [named[axis] if isinstance(axis, str) else (axis,) * 3 for axis in spec.shape]
    return tuple(zip(*axes, strict=True))


def _differs(bundle: Bundle, found: str, listed: str) -> BundleCorruptError:
    return BundleCorruptError(
        f"The engine has {found}, but the manifest of {bundle.path} lists {listed}.", hint="Rebuild the bundle."
    )
