"""The real TensorRT on a real GPU, against ONNX Runtime on the CPU. Not run yet: see docs/tensorrt_runtime.md."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.tensorrt.runner import TensorRtRunner
from hdruntime.bundle.manifest import Backend, ProfileShape
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.driver import gpus
from hdruntime.gpu.options import GpuOptions
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
def variant(request: pytest.FixtureRequest) -> Backend:
    for package in (request.param, "cuda", "torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    return Backend(request.param)


@pytest.fixture(scope="module", params=[None, "window:16"], ids=["dense", "window"])
def bundle(request: pytest.FixtureRequest, variant: Backend, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.engines.build import EngineOptions
    from hdruntime.bundle.manifest import Task
    from support.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp(variant.value)
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
            attention=attention_from_spec(request.param),
            engines=EngineOptions(variants=(variant,), profiles=PROFILES),
            verify=None,
        )
    )
    built = open_bundle(folder / "bundle")
    if gpus()[0].architecture not in built.manifest.engines[0].architectures:
        pytest.skip(f"{variant.value} has no engines for GPUs of {gpus()[0].architecture}")
    return built


Case = tuple[dict[str, np.ndarray], np.ndarray]
CaseMaker = Callable[..., Case]
RunnerMaker = Callable[[str | None], TensorRtRunner]


@pytest.fixture(scope="module")
def case(bundle: Bundle) -> CaseMaker:
    """Make a batch: (rows, tokens, seed=0) -> its inputs, and the CPU's answer."""
    runner, accepted = OnnxRuntimeRunner(bundle), [spec.name for spec in bundle.manifest.inputs]

    def make(rows: int, tokens: int, seed: int = 0) -> Case:
        generator = np.random.default_rng(1000 * rows + tokens + seed)
        lengths = generator.integers(1, tokens + 1, (rows, 1))
        lengths[0] = tokens
        mask = (np.arange(tokens) < lengths).astype(np.int64)
        ids = np.where(mask == 1, generator.integers(5, VOCABULARY, (rows, tokens)), 1)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        inputs = {name: given[name] for name in accepted}
        return inputs, runner.start(inputs, [HIDDEN])()[HIDDEN]

    return make


@pytest.fixture
def new_runner(bundle: Bundle, variant: Backend) -> Iterator[RunnerMaker]:
    """Make a runner: (graphs="on" | "off", or None for the defaults)."""
    opened: list[TensorRtRunner] = []

    def make(graphs: str | None) -> TensorRtRunner:
        eager = variant is Backend.TENSORRT_RTX and graphs == "on"
        options = {"graphs": graphs, "kernel_specialization": "eager" if eager else None} if graphs else {}
        gpu = GpuOptions(**options)
        opened.append(TensorRtRunner(bundle, bundle.manifest.engines[0], backend=variant, gpu=gpu))
        return opened[-1]

    yield make
    for runner in opened:
        runner.close()


@pytest.fixture(params=["off", "on"])
def on_gpu(request: pytest.FixtureRequest, new_runner: RunnerMaker) -> TensorRtRunner:
    return new_runner(request.param)


def check(runner: TensorRtRunner, inputs: dict[str, np.ndarray], expected: np.ndarray) -> None:
    """Run a batch and compare its results with the CPU's."""
    check_results(runner.start(inputs, [HIDDEN])()[HIDDEN], inputs, expected)


def check_results(actual: np.ndarray, inputs: dict[str, np.ndarray], expected: np.ndarray) -> None:
    mask = inputs["attention_mask"]
    assert (actual[mask == 0] == 0).all()
    assert_same_directions(actual[mask == 1], expected[mask == 1], cosine=COSINE)


def test_every_length_is_as_on_the_cpu(case: CaseMaker, on_gpu: TensorRtRunner) -> None:
    # Graphs, if they are on, begin with the second run of a shape.
    for rows, tokens in itertools.product((1, 3, 4), (1, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1023, 1024)):
        for seed in range(3):
            check(on_gpu, *case(rows, tokens, seed))


def test_two_in_flight_do_not_touch_each_other(case: CaseMaker, on_gpu: TensorRtRunner) -> None:
    cases = [case(1 + seed % 4, (30, 128, 700)[seed % 3], seed) for seed in range(24)]
    for pair in zip(cases[::2], cases[1::2], strict=True):
        started = [on_gpu.start(inputs, [HIDDEN]) for inputs, _ in pair]
        for (inputs, expected), results in zip(pair, started, strict=True):
            check_results(results()[HIDDEN], inputs, expected)


def test_graphs_are_used_and_none_differs(
    case: CaseMaker, new_runner: RunnerMaker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = new_runner("on")
        for seed in range(5):
            check(runner, *case(1, 64, seed))
        used = len(runner._model._graphs)
        runner.close()
    assert (used, "CUDA graphs are off" in caplog.text) == (1, False), caplog.text


def test_arrays_of_pytorch_go_in_and_out(case: CaseMaker, on_gpu: TensorRtRunner) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'hdexport[export]'")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    for seed, dtype in enumerate([torch.int64, torch.int32, torch.int64]):
        inputs, expected = case(3, 200, seed)
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
            check_results(result.cpu().numpy(), inputs, expected)


def test_a_lack_of_memory_is_an_error_and_the_next_batch_runs(case: CaseMaker, new_runner: RunnerMaker) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which takes the memory away, is not installed")
    runner = new_runner("off")
    check(runner, *case(1, 16))
    free, _ = torch.cuda.mem_get_info()
    # A batch of 4 x 1024 tokens needs more than the rest.
    hoard = [torch.empty(free - (2 << 20), dtype=torch.uint8, device="cuda")]
    large = case(4, 1024)
    try:
        with pytest.raises(OutOfMemoryError, match="memory"):
            runner.start(large[0], [HIDDEN])()
    finally:
        hoard.clear()
        torch.cuda.empty_cache()
    check(runner, *large)


def test_closing_frees_all_memory(case: CaseMaker, new_runner: RunnerMaker) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which measures memory, is not installed")
    inputs, _ = case(4, 1024)
    free = []
    for _ in range(4):
        runner = new_runner("on")
        for _ in range(3):
            runner.start(inputs, [HIDDEN])()
        runner.close()
        free.append(torch.cuda.mem_get_info()[0])
    # The first may leave memory that a process needs once.
    assert max(free[1:]) - min(free[1:]) < 16 << 20, free


def test_the_runtime_cache_of_tensorrt_rtx_is_written_and_read(
    bundle: Bundle, variant: Backend, case: CaseMaker, new_runner: RunnerMaker, caplog: pytest.LogCaptureFixture
) -> None:
    if variant is not Backend.TENSORRT_RTX:
        pytest.skip("only TensorRT-RTX has a runtime cache")
    for _ in range(2):
        runner = new_runner(None)
        check(runner, *case(2, 100))
        runner.close()
        assert len(list((bundle.path / "engines").glob("*.runtime_cache"))) == 1
    assert "runtime cache" not in caplog.text
