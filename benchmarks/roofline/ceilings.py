"""The best rates of a machine: of large matrix products, and of large copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hdexport.bench.measure.calls import time_runs
from hdplugins import ONNX_OPSET
from hdruntime.errors import InputError
from hdruntime.optional import require
from hdruntime.process_limits import free_bytes

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "tf32", "float16", "bfloat16")
"""Types of matrix products; ``tf32`` is float32 in memory, multiplied on a GPU with 10 bits of mantissa."""

_PRODUCTS = {
    "cpu": ((256, 768, 3072), (1024, 1024, 1024), (2048, 768, 3072)),
    "cuda": ((8192, 8192, 8192), (16384, 4096, 4096), (32768, 768, 3072)),
}
"""Device -> (rows, summed, columns) of the products that are tried: square ones and a model's. On a shared CPU, a short
product is more likely to run undisturbed once."""

_COPY_BYTES = 2**30
"""Bytes of a copy: at least twice the last-level cache of any CPU and GPU of today."""

_SHARE_OF_MEMORY = 8
"""A copy's source takes at most this part of the free memory."""

_LEAST_RUNS = 3
_LEAST_SECONDS = 0.25
_MOST_RUNS = 1000
_FLUSH_BYTES = 2**28
"""More than the L2 cache of any GPU."""

_WARM_UP_RUNS = 3
_IR_VERSION = 10
"""Version of ONNX files that every supported ONNX Runtime can read."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Best rates that a machine reached in a dtype."""

    device: str
    dtype: str
    matmul_flops_per_s: float
    copy_bytes_per_s: float


def measured_ceilings(device: str, dtype: str = "float32", threads: int | None = None) -> Ceilings:
    """Measures both ceilings in a second or two. `threads` are CPU threads, which stay set; None leaves PyTorch's own
    number.

    A product's rate is the fastest run of some large products, by PyTorch and, in float32 on a CPU, by ONNX Runtime: on
    an AMD EPYC of 2025, ONNX Runtime's are more than twice as fast, and a ceiling must not be exceeded. A copy's rate
    counts the bytes read and written of the fastest run of one copy larger than any cache.
    """
    if device not in _PRODUCTS or dtype not in DTYPES or (device, dtype) == ("cpu", "tf32"):
        raise InputError(
            f"Ceilings of {device} in {dtype} cannot be measured.\n"
            f"Devices are {', '.join(_PRODUCTS)}; dtypes are {', '.join(DTYPES)}, tf32 on cuda only."
        )
    torch = require("torch")
    if threads is not None:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        flops_per_s = max(_rate_of_product(torch, *sizes, device=device, dtype=dtype) for sizes in _PRODUCTS[device])
        if (device, dtype) == ("cpu", "float32"):
            count = torch.get_num_threads()
            flops_per_s = max(
                flops_per_s, *(_rate_by_onnxruntime(*sizes, threads=count) for sizes in _PRODUCTS[device])
            )
        bytes_per_s = _rate_of_copy(torch, device)
    return Ceilings(device=device, dtype=dtype, matmul_flops_per_s=flops_per_s, copy_bytes_per_s=bytes_per_s)


def times_ms(call: Callable[[], Any], *, device: str, least_s: float = _LEAST_SECONDS) -> list[float]:
    """Latencies of a repeated call: by the clock on a CPU, by `replayed_ms` on a GPU. The timed runs together take
    about `least_s`, and are at least 3."""
    if device == "cuda":
        return replayed_ms(call, least_s=least_s)
    call()  # touches every page
    return time_runs(call, min_runs=_LEAST_RUNS, min_seconds=least_s)


def replayed_ms(call: Callable[[], Any], *, least_s: float = _LEAST_SECONDS) -> list[float]:
    """Latencies on the GPU of a call that was captured in a CUDA graph, without the time to start it from Python. Each
    replay is timed by events and begins with a cold L2 cache.

    The call works on existing tensors, and neither copies to the CPU nor waits for the GPU.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):  # compiles, and allocates cached memory
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    (first_ms,) = _replays(torch, graph, flush, 1)
    runs = int(least_s * 1e3 / max(first_ms, 1e-3))
    return _replays(torch, graph, flush, min(max(runs, _LEAST_RUNS), _MOST_RUNS))


def _rate_of_product(torch: Any, rows: int, summed: int, columns: int, *, device: str, dtype: str) -> float:
    """Floating-point operations per second."""
    element = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    left = torch.randn(rows, summed, device=device, dtype=element)
    right = torch.randn(summed, columns, device=device, dtype=element)
    out = torch.empty(rows, columns, device=device, dtype=element)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        best_ms = min(times_ms(lambda: torch.mm(left, right, out=out), device=device))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * rows * summed * columns / best_ms * 1e3


def _rate_by_onnxruntime(rows: int, summed: int, columns: int, *, threads: int) -> float:
    """Floating-point operations per second; the right matrix is a constant, as a model's weights are."""
    import onnxruntime

    onnx = require("onnx")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    left, right = (np.random.default_rng(0).random(shape, np.float32) for shape in ((rows, summed), (summed, columns)))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["left", "right"], ["product"])],
        "product",
        [helper.make_tensor_value_info("left", number, [rows, summed])],
        [helper.make_tensor_value_info("product", number, [rows, columns])],
        [onnx.numpy_helper.from_array(right, "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", ONNX_OPSET)], ir_version=_IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    best_ms = min(times_ms(lambda: session.run(None, {"left": left}), device="cpu"))
    return 2 * rows * summed * columns / best_ms * 1e3


def _rate_of_copy(torch: Any, device: str) -> float:
    """Bytes per second."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else free_bytes() or _COPY_BYTES * _SHARE_OF_MEMORY
    source = torch.zeros(min(_COPY_BYTES, free // _SHARE_OF_MEMORY), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_ms = min(times_ms(lambda: target.copy_(source), device=device))
    return float(2 * source.nbytes / best_ms * 1e3)


def _replays(torch: Any, graph: torch.cuda.CUDAGraph, flush: torch.Tensor, count: int) -> list[float]:
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in marks:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]
