"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider."""

from __future__ import annotations

__all__ = ["OnnxRuntimeCudaRunner"]

import contextlib
import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.backends.onnxruntime_sessions import (
    Inputs,
    Outputs,
    chosen_graph,
    closed_error,
    open_session,
    run_error,
    session_options,
)
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CUDA_LOWERING, CUDA_PROVIDER, PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.gpu.options import GpuOptions

logger = logging.getLogger(__name__)

_DEVICE = "cuda"
"""What ONNX Runtime calls the memory of a GPU."""

_SDPA_KERNELS = 1 + 2 + 16
"""Flash, memory-efficient and plain attention, whatever ONNX Runtime's environment variables say: the graph's choice of
masks relies on them. TensorRT's old kernels, which it would prefer for some shapes, know no Hopper."""


class OnnxRuntimeCudaRunner:
    """A bundle's graph in an ONNX Runtime session on a GPU; see `hdruntime.backends.Runner`, also for threads.

    A batch runs as it is given, its padding with it. Inputs are copied to the GPU once, results back once.

    Args:
        bundle: its graph for ONNX Runtime on a GPU is taken, else its portable one.
        gpu: the device, and the memory that may be used.
        threads: CPU threads for what does not run on the GPU, None for ONNX Runtime's choice.

    Raises:
        InputError: the limit of memory is not positive.
        BackendUnavailableError: ONNX Runtime cannot start its CUDA provider.
        BackendError: ONNX Runtime cannot load the graph.
        OutOfMemoryError: the GPU has too little memory for it, or the limit leaves too little.
        BundleCorruptError: the bundle has no graph, or one that differs from its manifest.
    """

    backend = Backend.ONNXRUNTIME_CUDA
    prefers_equal_lengths = False
    batch_tokens = 16384
    """As for engines; not measured on a GPU yet."""
    most_in_flight = 1
    """A run waits for its results, so a second one would only wait with it."""

    def __init__(self, bundle: Bundle, *, gpu: GpuOptions | None = None, threads: int | None = None) -> None:
        manifest = bundle.manifest
        gpu = gpu or GpuOptions()
        graph = chosen_graph(bundle, (CUDA_LOWERING, PORTABLE_LOWERING), where="a GPU")
        self._ids, self._mask = manifest.ids, manifest.mask
        self._token_axis = {spec.name: spec.has_tokens_axis for spec in manifest.outputs}
        self._device_id = gpu.device
        self._lock = threading.Lock()
        self.max_len = manifest.max_len
        _preload_libraries()
        session = open_session(bundle, graph, session_options(threads), providers=_providers(gpu))
        _check_provider(session)
        self._session: Any = session
        logger.info("%s runs %s on GPU %d", self.backend.value, graph.file, gpu.device)

    def most_rows(self, tokens: int) -> int:
        """Any number; see :class:`hdruntime.backends.Runner`."""
        return sys.maxsize

    def computed_tokens(self, attention_mask: npt.NDArray[np.int64]) -> int:
        """All of them; see :class:`hdruntime.backends.Runner`."""
        return attention_mask.size

    def start(self, inputs: Inputs, outputs: Sequence[str]) -> Callable[[], Outputs]:
        """The run of a batch, which begins when its results are asked for; see :class:`hdruntime.backends.Runner`."""
        return functools.partial(self._run, inputs, outputs)

    def close(self) -> None:
        """Free memory, as soon as no other thread is amid a run; see :class:`hdruntime.backends.Runner`."""
        self._session = None

    def _run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        # One batch at a time: two at once would need the memory of both.
        with self._lock:
            session = self._session
            if session is None:
                raise closed_error()
            try:
                arrays = _run_bound(session, inputs, outputs, self._device_id)
            except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
                raise run_error(error, *inputs[self._ids].shape) from error
        results: Outputs = dict(zip(outputs, arrays, strict=True))
        attention_mask = inputs[self._mask]
        if not attention_mask.all():
            for name, values in results.items():
                if self._token_axis[name]:
                    values[attention_mask == 0] = 0
        return results


def _providers(gpu: GpuOptions) -> list[tuple[str, dict[str, str]]]:
    """Names and options; what has no kernel for a GPU, such as the arithmetic on shapes, runs on the CPU."""
    return [(CUDA_PROVIDER, _cuda_options(gpu)), ("CPUExecutionProvider", {})]


def _cuda_options(gpu: GpuOptions) -> dict[str, str]:
    # All values are texts.
    options = {
        "device_id": str(gpu.device),
        # Twice as much as asked for, the default, would leave nothing for a second process.
        "arena_extend_strategy": "kSameAsRequested",
        "sdpa_kernel": str(_SDPA_KERNELS),
        # A float32 bundle is float32: TF32 keeps 10 bits of a product's mantissa.
        "use_tf32": "0",
    }
    if gpu.memory_limit_bytes is None:
        return options
    if gpu.memory_limit_bytes < 1:
        raise InputError(
            f"memory_limit_bytes is {gpu.memory_limit_bytes}; it must be 1 or more, for example 8 * 2**30."
        )
    return options | {"gpu_mem_limit": str(gpu.memory_limit_bytes)}


def _preload_libraries() -> None:
    """Load CUDA and cuDNN from their Python packages, where ``pip install 'onnxruntime-gpu[cuda,cudnn]'`` put them."""
    import onnxruntime

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    if said.getvalue():
        logger.info("loading CUDA for ONNX Runtime: %s", said.getvalue().strip())


def _check_provider(session: Any) -> None:
    """Refuse a session that runs on the CPU in place of a GPU, as ONNX Runtime's do where CUDA does not load."""
    found = session.get_providers()
    if found[0] != CUDA_PROVIDER:
        import onnxruntime

        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} could not start its CUDA provider and would run on {found[0]}: "
            "CUDA or cuDNN is missing, or of another version; the line above from ONNX Runtime says which.\n"
            "Install those it was built for with: pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )


def _run_bound(session: Any, inputs: Inputs, outputs: Sequence[str], device: int) -> list[Any]:
    """The outputs of a run that are copied from the GPU once, inputs being copied to it once."""
    import onnxruntime

    binding = session.io_binding()
    for name, array in inputs.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), _DEVICE, device)
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name, _DEVICE, device)
    session.run_with_iobinding(binding)
    return list(binding.copy_outputs_to_cpu())
