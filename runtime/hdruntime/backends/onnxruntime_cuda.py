"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider."""

from __future__ import annotations

__all__ = ["OnnxRuntimeCudaRunner"]

import contextlib
import io
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hdruntime.backends.bundle_graphs import chosen_graph
from hdruntime.backends.bundle_runner import Inputs, Outputs
from hdruntime.backends.onnxruntime_memories import DeviceMemories
from hdruntime.backends.onnxruntime_sessions import (
    GraphRunner,
    open_session,
    session_options,
)
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CUDA_LOWERING, CUDA_PROVIDER, PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.gpu.options import GpuOptions

logger = logging.getLogger(__name__)

_DEVICE = "cuda"
"""ONNX Runtime's name for the memory of a GPU."""

_SDPA_KERNELS = 1 + 2 + 16
"""Flash, memory-efficient and plain attention, whatever ONNX Runtime's environment variables say: the graph's choice of
masks relies on them. TensorRT's old kernels, which it would prefer for some shapes, know no Hopper. cuDNN's attention
(8), which it would prefer from sm_90 on, stays out on every GPU: cuDNN makes a plan for each batch size and length,
which takes the CPU about 40 ms (pytorch/pytorch#191576), ONNX Runtime keeps every plan (`cudnn_flash_attention.cc`),
and texts have any length. Of masks, cuDNN takes lengths, [batch], alone, for which GPUs without cuDNN's attention have
plain products, with memory quadratic in tokens; a graph serves them all."""


class OnnxRuntimeCudaRunner(GraphRunner):
    """A bundle's graph in an ONNX Runtime session on a GPU; see `hdruntime.backends.Runner`, also for threads.

    A batch runs as given, padding included. Inputs are copied to the GPU once, results back once.

    Args:
        bundle: the runner takes its graph for ONNX Runtime on a GPU, else its portable graph.
        gpu: the device, and the memory that the runner may use.
        threads: CPU threads for nodes that do not run on the GPU; None for ONNX Runtime's choice.

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

    def __init__(self, bundle: Bundle, *, gpu: GpuOptions | None = None, threads: int | None = None) -> None:
        gpu = gpu or GpuOptions()
        graph = chosen_graph(bundle, (CUDA_LOWERING, PORTABLE_LOWERING), where="a GPU")
        _preload_libraries()
        session = open_session(bundle, graph, session_options(threads), providers=_providers(gpu))
        _check_provider(session)
        super().__init__(bundle, session)
        self.device = _DEVICE, gpu.device
        self._lock = threading.Lock()
        logger.info("%s runs %s on GPU %d", self.backend.value, graph.file, gpu.device)

    def open_memories(self, rows: int) -> DeviceMemories:
        """Values in the memory of the GPU; see :class:`hdruntime.backends.Runner`."""
        return DeviceMemories(self, rows)

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run a batch; see :class:`hdruntime.backends.Runner`."""
        return self.run_bound(inputs, outputs, {}, {})

    def run_bound(
        self, inputs: Inputs, outputs: Sequence[str], memories: Mapping[str, Any], left: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch on memories that stay on the GPU."""
        # One batch at a time: two at once would need the memory of both.
        with self._lock:
            results = super().run_bound(inputs, outputs, memories, left)
        attention_mask = inputs[self.mask]
        if not attention_mask.all():
            for name, values in results.items():
                if self._has_tokens_axis[name]:
                    values[attention_mask == 0] = 0
        return results


def _providers(gpu: GpuOptions) -> list[tuple[str, dict[str, str]]]:
    """Names and options; nodes without a kernel for a GPU, such as arithmetic on shapes, run on the CPU."""
    # All values are strings.
    options = {
        "device_id": str(gpu.device),
        # The default allocates twice the request, which would leave nothing for a second process.
        "arena_extend_strategy": "kSameAsRequested",
        "sdpa_kernel": str(_SDPA_KERNELS),
        # A float32 bundle is float32: TF32 keeps 10 bits of a product's mantissa.
        "use_tf32": "0",
    }
    limit_bytes = gpu.memory_limit_bytes
    if limit_bytes is not None:
        if limit_bytes < 1:
            raise InputError(f"memory_limit_bytes is {limit_bytes}; it must be 1 or more, for example 8 * 2**30.")
        options["gpu_mem_limit"] = str(limit_bytes)
    return [(CUDA_PROVIDER, options), ("CPUExecutionProvider", {})]


def _preload_libraries() -> None:
    """Load CUDA and cuDNN from their Python packages, where ``pip install 'onnxruntime-gpu[cuda,cudnn]'`` put them."""
    import onnxruntime

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    if said.getvalue():
        logger.info("loading CUDA for ONNX Runtime: %s", said.getvalue().strip())


def _check_provider(session: Any) -> None:
    """Refuse a session that fell back to the CPU, as ONNX Runtime's sessions do where CUDA does not load."""
    found = session.get_providers()
    if found[0] != CUDA_PROVIDER:
        import onnxruntime

        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} could not start its CUDA provider and would run on {found[0]}: "
            "CUDA or cuDNN is missing, or of another version; the line above from ONNX Runtime says which.\n"
            "Install those it was built for with: pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
