"""Engines of TensorRT's variants behind the interface of `hdruntime.backends.Runner`."""

from __future__ import annotations

import logging
from typing import Any

from hdruntime.backends.gpu_runner import GpuRunner, closed_error
from hdruntime.backends.tensorrt.engine import KernelSpecialization, load_engine
from hdruntime.backends.tensorrt.engine_model import EngineModel
from hdruntime.backends.tensorrt.graph_policy import GraphMode, GraphPolicy
from hdruntime.backends.tensorrt.runtime_cache import RuntimeCache, RuntimeCacheFile
from hdruntime.backends.tensorrt.shapes import check_limits, longest, max_rows
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.gpu.options import GpuOptions
from hdruntime.text.checks import checked_choice

logger = logging.getLogger(__name__)


class TensorRtRunner(GpuRunner[EngineModel]):
    """An engine on a GPU; see `GpuRunner`.

    The engine is one that this machine can run; the backend is the variant that built it, or ``Backend.TENSORRT_LEAN``
    for version-compatible engines. An engine that would pad some batches so far that their outputs change is rejected.
    """

    def __init__(self, bundle: Bundle, engine: EngineFile, *, backend: Backend, gpu: GpuOptions) -> None:
        self.backend = backend
        mode, specialization = _checked_options(backend, gpu)
        self._profiles, self._limit = engine.profiles, bundle.manifest.padding_limit
        check_limits(self._profiles, self._limit)

        def open_model(device: Device, stream: Any) -> EngineModel:
            file = _runtime_cache_file(bundle, engine, device) if backend is Backend.TENSORRT_RTX else None
            cached = None if file is None else file.read()
            loaded = load_engine(bundle, engine, backend, specialization=specialization, cached=cached)
            cache = None if file is None else RuntimeCache(file, loaded.cache)
            return EngineModel(
                device, loaded, GraphPolicy(mode), cache,
                profiles=self._profiles, limit=self._limit, stream=stream, max_graphs=gpu.max_graphs,
            )  # fmt: skip

        super().__init__(bundle.manifest, gpu.device, open_model)
        self.max_len = min(self.max_len, longest(engine.profiles))
        logger.info("%s runs %s on GPU %d", backend, engine.file, gpu.device)

    def engine_bytes(self) -> int | None:
        """Weights and scratch memory on the GPU; see :class:`hdruntime.backends.DeviceRunner`."""
        with self._lock:
            if self._pipeline is None:
                raise closed_error()
            return self._model.engine_bytes

    def max_rows(self, tokens: int) -> int:
        """Most rows of a batch of this length; 0 if no profile accepts the length."""
        return max_rows(self._profiles, tokens, limit=self._limit(tokens))


def _runtime_cache_file(bundle: Bundle, engine: EngineFile, device: Device) -> RuntimeCacheFile:
    gpu = gpus()[device.ordinal : device.ordinal + 1]
    here = (gpu[0].name, gpu[0].architecture) if gpu else ()
    sha256 = bundle.manifest.files[engine.file].sha256
    return RuntimeCacheFile(bundle.file(engine.file), (sha256, engine.version, driver_version() or "", *here))


def _checked_options(backend: Backend, gpu: GpuOptions) -> tuple[GraphMode, KernelSpecialization]:
    mode = checked_choice(GraphMode, gpu.graphs, option="graphs")
    if gpu.max_graphs < 1:
        raise InputError(f"max_graphs is {gpu.max_graphs}; it must be 1 or more. graphs='off' uses none.")
    if backend is not Backend.TENSORRT_RTX:
        if gpu.kernel_specialization is not None:
            raise InputError(f"kernel_specialization is for tensorrt_rtx, not {backend}. Leave it out.")
        return mode, KernelSpecialization.LAZY
    lazy = KernelSpecialization.LAZY
    wanted = checked_choice(KernelSpecialization, gpu.kernel_specialization or lazy, option="kernel_specialization")
    if wanted is not lazy or mode is GraphMode.OFF:
        return mode, wanted
    if mode is GraphMode.ON:
        raise InputError(
            "graphs='on' needs kernel_specialization='eager' or 'none': lazy replaces kernels between runs.",
            hint="Give one of them, or graphs='auto'.",
        )
    logger.info(
        "no CUDA graphs: TensorRT-RTX specialises kernels lazily; kernel_specialization eager or none allows them"
    )
    return GraphMode.OFF, wanted
