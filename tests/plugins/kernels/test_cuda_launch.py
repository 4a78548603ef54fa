"""Launches through the real cuda-python: on a driver library that only prints them, and on a GPU where there is one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hdplugins.attention.window.plugin import PLUGIN_SPEC
from hdplugins.attention.window.reference import sliding_window_attention
from hdplugins.kernels.aot import compile_kernels
from hdplugins.kernels.cuda_launch import Launch, LaunchError, PreparedLaunch
from hdplugins.tensorrt.link import provide_library_link
from support.comparators import assert_close

FAKES = Path(__file__).parents[2] / "fakes"

needs_cuda_python = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-python is not installed: pip install cuda-bindings"
)

_PROGRAM = """
import sys
from pathlib import Path
from hdplugins.kernels.cuda_launch import Launch, LaunchError, PreparedLaunch, load_kernels
kernel = load_kernels(Path(sys.argv[1]), "Some-", ["fill"], serves=lambda kernel: True)["fill"]
launch = Launch(kernel="fill", grid=(3, 2, 1), scalars={"count": -7, "factor": 0.5})
prepared = PreparedLaunch(kernel, launch, {"out": 1})
for stream in (0x77, 0):
    try:
        prepared.start([0x1000, 0x2000], kernel.driver.CUstream(stream))
    except LaunchError as error:
        print(error)
"""


def _write_kernel(folder: Path) -> None:
    folder.mkdir()
    cubin = folder / "Some-fill.cubin"
    cubin.write_bytes(b"\x7fmachine code")
    described = {
        "name": "fill", "function": "fill", "architecture": 86,
        "arguments": [["out", "*fp32"], ["count", "i32"], ["factor", "fp32"]], "scratch_pointers": 2, "constants": {},
        "num_warps": 4, "shared_bytes": 50_000, "registers": 8, "spilled_bytes": 0, "triton": "none",
        "sha256": hashlib.sha256(cubin.read_bytes()).hexdigest(),
    }  # fmt: skip
    cubin.with_suffix(".json").write_text(json.dumps(described))


@needs_cuda_python
@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux")
def test_the_driver_reads_the_arguments_of_a_launch(tmp_path: Path) -> None:
    _write_kernel(tmp_path / "kernels")
    library = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(["cc", *flags, str(FAKES / "fake_libcuda.c"), "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"}
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "kernels")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "image \x7fmachine ",
        "function fill of 0xa0",
        "attribute 8 of 0xb0 is 50000",
        "launch 0xb0 grid 3 2 1 threads 128 1 1 shared 50000 stream 0x77 extra 0",
        "arguments 0x2000 -7 0.5 0 0",
        "launch 0xb0 grid 3 2 1 threads 128 1 1 shared 50000 stream (nil) extra 0",
        "arguments 0x2000 -7 0.5 0 0",
        "CUDA error 719 at launching fill with a grid of (3, 2, 1) and 128 threads: the reason.",
    ], done.stderr


def test_a_launch_that_does_not_fit_its_kernel_is_refused() -> None:
    arguments = (("data", "*fp32"), ("count", "i32"))
    compiled = SimpleNamespace(function="scale", arguments=arguments, num_warps=4, shared_bytes=0, scratch_pointers=0)
    kernel: Any = SimpleNamespace(compiled=compiled, driver=None, function=None)
    for scalars, message in (
        ({"count": 2**31}, "2147483648 does not fit"),
        ({}, "takes count: i32; the launch has"),
    ):
        launch = Launch(kernel="scale", grid=(1, 1, 1), scalars=scalars)
        with pytest.raises(LaunchError, match=message):
            PreparedLaunch(kernel, launch, {"data": 0})


class Gpu:
    """Memory, a stream and graphs of the real driver; every call that fails raises."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.call("cuInit", 0)
        device = self.call("cuDeviceGet", 0)
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", device))
        names = driver.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self.call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        self.architecture = 10 * major + minor
        self.stream = self.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.driver, name)(*arguments)
        assert int(code) == 0, f"{name}: {code}"
        return values[0] if values else None

    def upload(self, values: np.ndarray) -> int:
        address = self.call("cuMemAlloc", values.nbytes)
        self.call("cuMemcpyHtoD", address, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        return int(address)

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        self.call("cuStreamSynchronize", self.stream)
        values = np.empty_like(like)
        self.call("cuMemcpyDtoH", values.ctypes.data, address, values.nbytes)
        return values

    def overwrite(self, address: int, values: np.ndarray) -> None:
        self.call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-python is not installed")
    return Gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 255, 1000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_gpu_gives_the_right_answers_at_once_and_from_a_cuda_graph(
    dtype: type, tokens: int, gpu: Gpu, tmp_path: Path
) -> None:
    provide_library_link()
    try:
        import tensorrt_rtx as trt
    except ImportError:  # it supports no GPU of some architectures, which have these kernels all the same
        from fakes import bare_tensorrt as trt
    from fakes.simulated_gpu import plugin_of, tensor_descriptions

    name = np.dtype(dtype).name
    attributes = {"left": 64, "right": 32, "dilation": (1, 1, 3), "global_bound": 4, "scale": 0.125}
    shapes = [*[(2, 3, tokens, 64)] * 3, (2, tokens)]
    sources = PLUGIN_SPEC.kernel_sources(shapes, attributes, dtype=name, architectures=[gpu.architecture])
    for kernel in compile_kernels(sources):
        for file in (kernel.cubin, kernel.metadata):
            shutil.copyfile(file, tmp_path / f"SlidingWindowAttention-{file.name}")
    generator = np.random.default_rng(tokens)
    tensors = [generator.normal(size=(2, 3, tokens, 64)).astype(dtype) for _ in range(3)]
    kinds = np.ones((2, tokens), np.int32)
    kinds[0, : tokens // 3], kinds[1, tokens // 2] = 0, 2
    nothing = np.full_like(tensors[0], np.nan)
    addresses = [gpu.upload(values) for values in (*tensors, kinds)]
    out = gpu.upload(nothing)
    workspace = gpu.upload(np.full(PLUGIN_SPEC.workspace(shapes, attributes)["block_index"], 0xFF, np.uint8))

    plugin = plugin_of(trt, attributes, tmp_path).attach_to_context(None)
    described = tensor_descriptions(trt, shapes, name)
    plugin.on_shape_change(described, described[:1])

    def enqueue() -> None:
        plugin.enqueue(described, described[:1], addresses, [out], workspace, int(gpu.stream))

    enqueue()
    at_once = gpu.download(out, nothing)
    exact = sliding_window_attention(
        *(torch.from_numpy(values).double() for values in tensors), torch.from_numpy(kinds), **attributes
    )
    # float16 keeps 11 bits, of weights and of results of up to 4.
    assert_close(at_once, exact.numpy(), atol=2**-8 if dtype is np.float16 else 1e-5)

    gpu.overwrite(out, nothing)
    gpu.call("cuStreamBeginCapture", gpu.stream, gpu.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    enqueue()
    graph = gpu.call("cuStreamEndCapture", gpu.stream)
    assert np.isnan(gpu.download(out, nothing)).all(), "a captured launch must not run"
    runnable = gpu.call("cuGraphInstantiate", graph, 0)
    gpu.call("cuGraphLaunch", runnable, gpu.stream)
    np.testing.assert_array_equal(gpu.download(out, nothing), at_once)
