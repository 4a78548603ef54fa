"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hdruntime.arrays import Inputs, IntArray, Outputs
from hdruntime.backends.bundle_runner import HostStates, chosen_graph
from hdruntime.backends.onnxruntime import CUDA_LOWERING, CUDA_PROVIDER, ZEROED_OUTPUTS
from hdruntime.backends.onnxruntime.kernels import use_kernels
from hdruntime.backends.onnxruntime.sessions import GraphRunner, open_session, session_options
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.gpu.dlpack import CPU, CUDA, DlTensor, capsule_of, contiguous_strides
from hdruntime.gpu.driver import gpus
from hdruntime.gpu.options import GpuOptions

logger = logging.getLogger(__name__)

_DEVICE = "cuda"
"""ONNX Runtime's name for the memory of a GPU."""

_DEVICES = {"cpu": CPU, "cuda": CUDA}
"""ONNX Runtime's names of devices -> DLPack's."""

_SDPA_KERNELS = 1 + 2 + 16
"""Flash, memory-efficient and plain attention, against ONNX Runtime's environment variables: the graph's choice of
masks relies on them. TensorRT's old kernels, which ONNX Runtime would prefer for some shapes, know no Hopper. cuDNN's
attention (8), which ONNX Runtime would prefer from sm_90 on, stays out on every GPU. cuDNN makes a plan for each batch
size and length, which takes the CPU about 40 ms (pytorch/pytorch#191576); ONNX Runtime keeps every plan
(`cudnn_flash_attention.cc`), and texts have any length. Masks that cuDNN takes are lengths, [batch], alone, for which
GPUs without cuDNN's attention have plain products, with memory quadratic in tokens; one graph serves all GPUs."""


class OnnxRuntimeCudaRunner(GraphRunner):
    """A bundle's graph for a GPU, else its portable one, in a session on a GPU; see `hdruntime.backends.Runner`.

    A batch runs as given, padding included. Inputs are copied to the GPU once, results back once. A thread runs batches
    from their starts on, one after the other, while callers prepare others. `threads` are for nodes that do not run on
    the GPU; None for `chosen_threads`.
    """

    backend = Backend.ONNXRUNTIME_CUDA
    prefers_equal_lengths = False
    most_in_flight = 2
    batch_tokens = 16384
    """As for engines; not measured on a GPU yet."""

    def __init__(self, bundle: Bundle, *, gpu: GpuOptions | None = None, threads: int | None = None) -> None:
        gpu = gpu or GpuOptions()
        graph = chosen_graph(bundle, (CUDA_LOWERING, PORTABLE_LOWERING), where="a GPU")
        _preload_libraries()
        options, found = session_options(threads), gpus()
        if gpu.device < len(found):
            architecture = int(found[gpu.device].architecture.removeprefix("sm"))
            use_kernels(bundle, options, architecture=architecture, provider=CUDA_PROVIDER)
        session = open_session(bundle, graph, options, providers=_providers(gpu))
        _check_provider(session)
        super().__init__(bundle, session)
        self.device = _DEVICE, gpu.device
        zeroed = json.loads(session.get_modelmeta().custom_metadata_map.get(ZEROED_OUTPUTS, "[]"))
        self._left_to_host = {name for name, has_tokens in self._has_tokens_axis.items() if has_tokens} - set(zeroed)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "onnxruntime-cuda")
        logger.info("%s runs %s on GPU %d", self.backend.value, graph.file, gpu.device)

    def open_states(self, rows: int) -> DeviceStates:
        """Values in the memory of the GPU; see :class:`hdruntime.backends.Runner`."""
        return DeviceStates(self, rows)

    def start(self, inputs: Inputs, outputs: Sequence[str]) -> Callable[[], Outputs]:
        """Begin a batch when those before it have ended; see :class:`hdruntime.backends.Runner`."""
        running = self._thread.submit(self._run_padded, inputs, outputs, {}, {})
        # In the caller's thread, while the next batch runs.
        return lambda: self._without_padding(running.result(), inputs)

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run a batch; see :class:`hdruntime.backends.Runner`."""
        return self.run_bound(inputs, outputs, {}, {})

    def run_bound(
        self, inputs: Inputs, outputs: Sequence[str], carried: Mapping[str, Any], left: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch on carried states that stay on the GPU."""
        return self._without_padding(self._run_padded(inputs, outputs, carried, left), inputs)

    def _run_padded(
        self, inputs: Inputs, outputs: Sequence[str], carried: Mapping[str, Any], left: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch; results of padding have no meaning."""
        # One at a time, streams' included: two at once would need the memory of both.
        with self._lock:
            return super().run_bound(inputs, outputs, carried, left)

    def _without_padding(self, results: Outputs, inputs: Inputs) -> Outputs:
        """The results, 0 where tokens are padding; a portable graph does not see to it itself."""
        attention_mask = inputs[self.mask]
        if not attention_mask.all():
            for name in results.keys() & self._left_to_host:
                results[name][attention_mask == 0] = 0
        return results


class DeviceStates(HostStates):
    """The carried states of some rows as ONNX Runtime's values on its device."""

    def __init__(self, runner: GraphRunner, rows: int) -> None:
        super().__init__(runner, rows)
        self._device_number = runner.device[1]
        for states in (self._starts, self._read, self._written):
            states.update({name: runner.on_device(array) for name, array in states.items()})
        self._fresh = True

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run one segment of each row, padding included; see `hdruntime.backends.CarriedStates.run`."""
        self._fresh = False
        return self._run_whole(inputs, outputs)

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """See `hdruntime.backends.CarriedStates.computed_tokens`."""
        return self._runner.computed_tokens(attention_mask)

    def reset(self, rows: Sequence[int]) -> None:
        """Forget what rows carry; refused by versions of ONNX Runtime that do not share memory by DLPack."""
        if self._fresh:
            return
        for name, start in self._starts.items():
            for row in rows:
                _row(self._read[name], row, self._device_number).update_inplace(start)


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


def _row(value: Any, row: int, number: int) -> Any:
    """One row of an ``OrtValue`` on the device of that number, in place."""
    import onnxruntime

    from_dlpack = getattr(onnxruntime.OrtValue, "from_dlpack", None)
    if from_dlpack is None:
        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} cannot begin another document in a row of memories on a GPU.\n"
            "Update it: pip install -U onnxruntime-gpu. Or stream each document by itself: session.stream(document)"
        )
    shape = (1, *value.shape()[1:])
    place = value.data_ptr() + row * math.prod(shape) * np.dtype(np.float32).itemsize
    device = (_DEVICES[value.device_name().lower()], number)
    described = DlTensor(
        address=place, shape=shape, strides=contiguous_strides(shape), dtype=np.dtype(np.float32), device=device
    )
    return from_dlpack(capsule_of(described, value))
