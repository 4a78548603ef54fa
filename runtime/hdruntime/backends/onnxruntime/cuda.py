"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hdruntime.arrays import Inputs, Outputs
from hdruntime.backends.bundle_runner import chosen_graph
from hdruntime.backends.gpu_runner import GpuRunner
from hdruntime.backends.onnxruntime import CUDA_LOWERING, CUDA_PROVIDER, ZEROED_OUTPUTS
from hdruntime.backends.onnxruntime.kernels import use_kernels
from hdruntime.backends.onnxruntime.sessions import open_session, run_error, session_options
from hdruntime.bundle.manifest import Backend, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.device_states import DeviceStates
from hdruntime.gpu.driver import gpus
from hdruntime.gpu.layout import Layout, Shape, ShapeChoice, layout_of
from hdruntime.gpu.model import Tensors, staged_order
from hdruntime.gpu.options import GpuOptions
from hdruntime.gpu.slots import Slot
from hdruntime.text.checks import length_error

logger = logging.getLogger(__name__)

_DEVICE = "cuda"
"""ONNX Runtime's name for the memory of a GPU."""

_RUNS_BETWEEN_WAITS = 64
"""One run of so many waits for the GPU. At the end of such a run alone, ONNX Runtime gives pinned memory back out of
which kernels copied their arguments (`CleanUp` in `device_stream_collection.cc`)."""

_SDPA_KERNELS = 1 + 2 + 16
"""Flash, memory-efficient and plain attention, against ONNX Runtime's environment variables: the graph's choice of
masks relies on them. TensorRT's old kernels, which ONNX Runtime would prefer for some shapes, know no Hopper. cuDNN's
attention (8), which ONNX Runtime would prefer from sm_90 on, stays out on every GPU. cuDNN makes a plan for each batch
size and length, which takes the CPU about 40 ms (pytorch/pytorch#191576); ONNX Runtime keeps every plan
(`cudnn_flash_attention.cc`), and texts have any length. Masks that cuDNN takes are lengths, [batch], alone, for which
GPUs without cuDNN's attention have plain products, with memory quadratic in tokens; one graph serves all GPUs."""


class SessionModel:
    """A graph in a session of ONNX Runtime's CUDA provider; see `hdruntime.gpu.model.DeviceModel`.

    Runs are enqueued on the runner's stream, and no run waits for its end. This rests on ONNX Runtime's sources, which
    are alike in 1.23 to 1.32 (Python takes a stream since 1.18):

    * All runs of a session on a user's stream share one cuBLAS and one cuDNN handle, so that one may run at a time, in
      any thread (`RegisterStreamHandlers` and `OnRunStart` in `cuda_execution_provider.cc`).
    * Where a node on the CPU reads what the GPU computes, a condition of an `If` too, the run waits for that value
      (`WaitCudaNotificationOnHost` in `cuda_stream_handle.cc`).
    * What nodes on the CPU compute is pageable memory, out of which CUDA has copied when `cudaMemcpyAsync` returns: it
      may be overwritten then (`GetOrtDeviceByMemType` in `cuda_execution_provider.cc`, `gpu_data_transfer.cc`).
    * A run's memory is free for the next one when the run returns; kernels of both keep their order on the stream.
    """

    def __init__(self, device: Device, session: Any, manifest: Manifest, stream: Any) -> None:
        import onnxruntime

        self._device, self._session, self._stream = device, session, stream
        self.inputs: Tensors = {spec.name: (spec, np.dtype(spec.dtype)) for spec in staged_order(manifest.inputs)}
        self.outputs: Tensors = {spec.name: (spec, np.dtype(spec.dtype)) for spec in manifest.outputs}
        self.zeroed = frozenset(json.loads(session.get_modelmeta().custom_metadata_map.get(ZEROED_OUTPUTS, "[]")))
        self._has_states, self._max_len = bool(manifest.recurrent_states), manifest.max_len
        self._without_wait = onnxruntime.RunOptions()
        self._without_wait.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._runs = 0

    def choose(self, batch: int, tokens: int, *, memory: int = 0) -> ShapeChoice:
        """The batch's own shape; more tokens than the bundle has positions for are an InputError."""
        if tokens > self._max_len:
            # Of arrays on the GPU, which would read beyond the table of positions.
            raise length_error("The batch", tokens, self._max_len, "Truncate it")
        return ShapeChoice(0, Shape(batch, tokens, memory))

    def layouts(self, choice: ShapeChoice, outputs: Sequence[str]) -> tuple[Layout, Layout]:
        requested = {name: self.outputs[name] for name in outputs}
        return layout_of(self.inputs, choice.shape), layout_of(requested, choice.shape)

    def compute(self, slot: Slot, choice: ShapeChoice, inputs: Layout, outputs: Mapping[str, int]) -> None:
        """See `DeviceModel.compute`; only the outputs with addresses are written."""
        # An input that a node on the CPU reads is copied when it is bound (`BindInput` in `IOBinding.cc`), in no order
        # with the runner's streams. States are copied to the inputs on the computing stream.
        ready = slot.began if self._has_states else slot.copied_in
        if self._has_states:
            self._device.call("cuEventRecord", ready, self._stream)
        self._device.call("cuEventSynchronize", ready)
        try:
            self._run(slot.inputs.addresses(inputs), inputs, outputs, layout_of(self.outputs, choice.shape))
        except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
            # Without the traceback, whose frames would keep the session alive when its stream is gone.
            cause = error.with_traceback(None)
            raise run_error(cause, choice.shape.batch, choice.shape.tokens) from cause

    def _run(self, given: Mapping[str, int], inputs: Layout, wanted: Mapping[str, int], outputs: Layout) -> None:
        """Run a batch on the addresses of inputs and of outputs; layouts have their shapes."""
        binding = self._session.io_binding()
        for bind, addresses, layout in ((binding.bind_input, given, inputs), (binding.bind_output, wanted, outputs)):
            for name, address in addresses.items():
                place = layout.places[name]
                bind(name, _DEVICE, self._device.ordinal, place.dtype, place.shape, address)
        self._runs += 1
        self._session.run_with_iobinding(binding, self._without_wait if self._runs % _RUNS_BETWEEN_WAITS else None)

    def release(self) -> None:
        """Nothing: ONNX Runtime's memory is for the next batch."""

    def close(self) -> None:
        """Free the session."""
        self._session = None


class OnnxRuntimeCudaRunner(GpuRunner[SessionModel]):
    """A bundle's graph for a GPU, else its portable one, in a session on a GPU; see `GpuRunner`.

    A batch runs as given, padding included. `threads` are for nodes that do not run on the GPU; None for
    `chosen_threads`.
    """

    backend = Backend.ONNXRUNTIME_CUDA

    def __init__(self, bundle: Bundle, *, gpu: GpuOptions | None = None, threads: int | None = None) -> None:
        gpu = gpu or GpuOptions()
        graph = chosen_graph(bundle, (CUDA_LOWERING, PORTABLE_LOWERING), where="a GPU")

        def open_model(device: Device, stream: Any) -> SessionModel:
            _preload_libraries()
            options, found = session_options(threads), gpus()
            if gpu.device < len(found):
                architecture = int(found[gpu.device].architecture.removeprefix("sm"))
                use_kernels(bundle, options, architecture=architecture, provider=CUDA_PROVIDER)
            session = open_session(bundle, graph, options, providers=_providers(gpu, stream))
            _check_provider(session)
            return SessionModel(device, session, bundle.manifest, stream)

        super().__init__(bundle.manifest, gpu.device, open_model)
        self._thread = ThreadPoolExecutor(1, "onnxruntime-cuda")
        logger.info("%s runs %s on GPU %d", self.backend, graph.file, gpu.device)

    def max_rows(self, tokens: int) -> int:
        """Any number of rows; see :class:`hdruntime.backends.Runner`."""
        return sys.maxsize

    def _start(
        self, inputs: Inputs, outputs: Sequence[str], *, memory: int, states: DeviceStates | None = None
    ) -> Callable[[], Outputs]:
        # In a thread: a run waits for what nodes on the CPU need, and callers prepare the next batch meanwhile.
        try:
            started = self._thread.submit(super()._start, inputs, outputs, memory=memory, states=states)
        except RuntimeError:  # Python ends, and its threads take no more work
            return super()._start(inputs, outputs, memory=memory, states=states)
        return lambda: started.result()()


def _providers(gpu: GpuOptions, stream: Any) -> list[tuple[str, dict[str, str]]]:
    """Names and options; nodes without a kernel for a GPU, such as arithmetic on shapes, run on the CPU."""
    # All values are strings.
    options = {
        "device_id": str(gpu.device),
        "user_compute_stream": str(int(stream)),
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

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()
    if printed.getvalue():
        logger.info("loading CUDA for ONNX Runtime: %s", printed.getvalue().strip())


def _check_provider(session: Any) -> None:
    """Reject a session that fell back to the CPU, as ONNX Runtime's sessions do where CUDA does not load."""
    providers = session.get_providers()
    if providers[0] != CUDA_PROVIDER:
        import onnxruntime

        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} could not start its CUDA provider and would run on "
            f"{providers[0]}: CUDA or cuDNN is missing, or of another version; the line above from ONNX Runtime says "
            "which.",
            hint="Install the versions that ONNX Runtime was built for with: pip install 'onnxruntime-gpu[cuda,cudnn]'",
        )
