"""The real TensorRT on a real GPU, against ONNX Runtime on the CPU. Not run yet: see docs/tensorrt_runtime.md."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdruntime.backends.onnxruntime import OnnxRuntimeRunner
from hdruntime.backends.tensorrt import TensorRtRunner
from hdruntime.bundle.manifest import Backend, ProfileShape
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.driver import gpus
from support.comparators import assert_same_directions

pytestmark = pytest.mark.gpu

HIDDEN = "last_hidden_state"
VOCABULARY = 120
MAX_LEN = 1024
PROFILES = (
    ProfileShape(batch=(1, 1, 8), tokens=(1, 128, 128)),
    ProfileShape(batch=(1, 1, 4), tokens=(1, 1024, 1024)),
)
COSINE = 0.999
"""A build's promise for float16 (`hdexport.verify.comparison`)."""


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt_rtx"])
def flavour(request: pytest.FixtureRequest) -> Backend:
    for package in (request.param, "cuda", "torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    return Backend(request.param)


@pytest.fixture(scope="module", params=[None, "window:16"], ids=["dense", "window"])
def bundle(request: pytest.FixtureRequest, flavour: Backend, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    from hdexport.attention.spec import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.engines.build import EngineOptions
    from hdexport.model.tasks import Task
    from support.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp(flavour.value)
    # Fused attention needs a head_dim of at least 32.
    save_tiny_model(
        folder / "model", "bert", Task.FEATURE_EXTRACTION, hidden_size=64, num_attention_heads=2, intermediate_size=96
    )
    build(
        BuildOptions(
            model=folder / "model",
            output=folder / "bundle",
            max_len=MAX_LEN,
            precision="float16",
            attention=None if request.param is None else attention_from_spec(request.param),
            engines=EngineOptions(flavours=(flavour,), profiles=PROFILES),
            verify=None,
        )
    )
    built = open_bundle(folder / "bundle")
    if gpus()[0].architecture not in built.manifest.engines[0].architectures:
        pytest.skip(f"{flavour.value} has no engines for GPUs of {gpus()[0].architecture}")
    return built


@pytest.fixture(scope="module")
def on_cpu(bundle: Bundle) -> OnnxRuntimeRunner:
    return OnnxRuntimeRunner(bundle)


def options_of(flavour: Backend, graphs: str) -> dict[str, Any]:
    eager = flavour is Backend.TENSORRT_RTX and graphs == "on"
    return {"graphs": graphs, "kernel_specialization": "eager" if eager else None}


@pytest.fixture(params=["off", "on"])
def on_gpu(request: pytest.FixtureRequest, bundle: Bundle, flavour: Backend) -> Iterator[TensorRtRunner]:
    runner = TensorRtRunner(bundle, bundle.manifest.engines[0], **options_of(flavour, request.param))
    yield runner
    runner.close()


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1000 * rows + tokens + seed)
    lengths = generator.integers(1, tokens + 1, (rows, 1))
    lengths[0] = tokens
    mask = (np.arange(tokens) < lengths).astype(np.int64)
    ids = np.where(mask == 1, generator.integers(5, VOCABULARY, (rows, tokens)), 1)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def inputs_of(runner: OnnxRuntimeRunner, bundle: Bundle, rows: int, tokens: int, seed: int = 0) -> Any:
    accepted = {spec.name for spec in bundle.manifest.inputs}
    inputs = {name: values for name, values in batch(rows, tokens, seed).items() if name in accepted}
    return inputs, runner.start(inputs, [HIDDEN])()[HIDDEN]


def check(actual: np.ndarray, expected: np.ndarray, mask: np.ndarray) -> None:
    assert (actual[mask == 0] == 0).all()
    assert_same_directions(actual[mask == 1], expected[mask == 1], cosine=COSINE)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_every_length_is_as_on_the_cpu(
    rows: int, bundle: Bundle, on_cpu: OnnxRuntimeRunner, on_gpu: TensorRtRunner
) -> None:
    # Graphs, if they are on, begin with the second run of a shape.
    lengths = (1, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1023, 1024)
    for tokens, seed in [(tokens, seed) for tokens in lengths for seed in range(3)]:
        inputs, expected = inputs_of(on_cpu, bundle, rows, tokens, seed)
        check(on_gpu.start(inputs, [HIDDEN])()[HIDDEN], expected, inputs["attention_mask"])


def test_two_in_flight_do_not_touch_each_other(
    bundle: Bundle, on_cpu: OnnxRuntimeRunner, on_gpu: TensorRtRunner
) -> None:
    cases = [inputs_of(on_cpu, bundle, 1 + seed % 4, (30, 128, 700)[seed % 3], seed) for seed in range(24)]
    for first, second in zip(cases[::2], cases[1::2], strict=True):
        started = [on_gpu.start(inputs, [HIDDEN]) for inputs, _ in (first, second)]
        for (inputs, expected), results in zip((first, second), started, strict=True):
            check(results()[HIDDEN], expected, inputs["attention_mask"])


def test_graphs_are_used_and_none_differs(
    bundle: Bundle, flavour: Backend, on_cpu: OnnxRuntimeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = TensorRtRunner(bundle, bundle.manifest.engines[0], **options_of(flavour, "on"))
        for seed in range(5):
            inputs, expected = inputs_of(on_cpu, bundle, 1, 64, seed)
            check(runner.start(inputs, [HIDDEN])()[HIDDEN], expected, inputs["attention_mask"])
        assert runner._machine is not None
        used = len(runner._machine._graphs)
        runner.close()
    assert (used, "CUDA graphs are off" in caplog.text) == (1, False), caplog.text


def test_arrays_of_pytorch_go_in_and_out(bundle: Bundle, on_cpu: OnnxRuntimeRunner, on_gpu: TensorRtRunner) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'hdexport[export]'")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    for seed, dtype in enumerate([torch.int64, torch.int32, torch.int64]):
        inputs, expected = inputs_of(on_cpu, bundle, 3, 200, seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            # Work before the inputs, so that a reader that does not wait gets old values.
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                busy = busy @ busy / 64
            tensors = {
                name: torch.from_numpy(values).to("cuda", dtype) + (busy[0, 0] * 0).to(dtype)
                for name, values in inputs.items()
            }
            result = torch.from_dlpack(on_gpu.start_on_device(tensors, [HIDDEN])[HIDDEN])
            # Work after them that overwrites their memory.
            del tensors
            torch.full((3, 200), VOCABULARY - 1, device="cuda", dtype=dtype)
            check(result.cpu().numpy(), expected, inputs["attention_mask"])


def test_a_lack_of_memory_is_an_error_and_the_next_batch_runs(
    bundle: Bundle, on_cpu: OnnxRuntimeRunner, flavour: Backend
) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which takes the memory away, is not installed")
    runner = TensorRtRunner(bundle, bundle.manifest.engines[0], graphs="off")
    inputs, expected = inputs_of(on_cpu, bundle, 1, 16)
    check(runner.start(inputs, [HIDDEN])()[HIDDEN], expected, inputs["attention_mask"])
    free, _ = torch.cuda.mem_get_info()
    # A batch of 4 x 1024 tokens takes more than is left.
    hoard = [torch.empty(free - (2 << 20), dtype=torch.uint8, device="cuda")]
    large, expected_large = inputs_of(on_cpu, bundle, 4, 1024)
    try:
        with pytest.raises(OutOfMemoryError, match="memory"):
            runner.start(large, [HIDDEN])()
    finally:
        hoard.clear()
        torch.cuda.empty_cache()
    check(runner.start(large, [HIDDEN])()[HIDDEN], expected_large, large["attention_mask"])
    runner.close()


def test_closing_frees_all_memory(bundle: Bundle, flavour: Backend, on_cpu: OnnxRuntimeRunner) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which measures memory, is not installed")
    inputs, _ = inputs_of(on_cpu, bundle, 4, 1024)
    free = []
    for _ in range(4):
        runner = TensorRtRunner(bundle, bundle.manifest.engines[0], **options_of(flavour, "on"))
        for _ in range(3):
            runner.start(inputs, [HIDDEN])()
        runner.close()
        free.append(torch.cuda.mem_get_info()[0])
    # The first may leave memory that a process needs once.
    assert max(free[1:]) - min(free[1:]) < 16 << 20, free


def test_the_runtime_cache_of_tensorrt_rtx_is_written_and_read(
    bundle: Bundle, flavour: Backend, on_cpu: OnnxRuntimeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    if flavour is not Backend.TENSORRT_RTX:
        pytest.skip("only TensorRT-RTX has a runtime cache")
    inputs, expected = inputs_of(on_cpu, bundle, 2, 100)
    for _ in range(2):
        runner = TensorRtRunner(bundle, bundle.manifest.engines[0])
        check(runner.start(inputs, [HIDDEN])()[HIDDEN], expected, inputs["attention_mask"])
        runner.close()
        files: list[Path] = list((bundle.path / "engines").glob("*.runtime_cache"))
        assert len(files) == 1
    assert "runtime cache" not in caplog.text
