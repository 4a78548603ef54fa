"""ONNX Runtime on a GPU: tests that need no GPU, and tests on one."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import hdruntime
from fakes.machine import new_batch
from fakes.simulated_device import SimulatedDevice
from hdexport.graph.passes.zero_padding import ZeroPadding
from hdexport.graph.targets.onnxruntime.cuda import lower_for_onnxruntime_cuda
from hdexport.support.bundle_writer import seal
from hdruntime.backends.onnxruntime import cuda as onnxruntime_cuda
from hdruntime.backends.onnxruntime.cuda import OnnxRuntimeCudaRunner
from hdruntime.backends.onnxruntime.sessions import run_error
from hdruntime.bundle.manifest import Backend, GraphFile
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, BackendUnavailableError, InputError, OutOfMemoryError
from hdruntime.gpu.options import GpuOptions
from support.answers import inputs_of
from support.comparators import named_case
from support.padded_batches import cases
from support.tiny_bundle import NAN_ID, hidden_states

CUDA_HERE = "CUDAExecutionProvider" in onnxruntime.get_available_providers()

IDS = np.array([[2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])


@pytest.mark.usefixtures("cuda_on_cpu")
def test_answers_equal_the_cpus_backend(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    with hdruntime.load(bundle, "onnxruntime") as session:
        expected = session(input_ids=IDS, attention_mask=MASK)
    runner = OnnxRuntimeCudaRunner(bundle)
    assert runner.computed_tokens(MASK) == MASK.size
    assert runner.max_padding(9) == sys.maxsize
    names = list(expected)
    got = runner.start({"input_ids": IDS, "attention_mask": MASK}, names)()
    assert list(got) == names
    for name in names:
        np.testing.assert_array_equal(got[name], expected[name])
    assert (got["last_hidden_state"][MASK == 0] == 0).all()
    runner.close()
    with pytest.raises(BackendError, match="closed"):
        runner.start({"input_ids": IDS, "attention_mask": MASK}, names)()


def test_a_session_that_fell_back_to_the_cpu_is_refused(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not simulated: without CUDA, ONNX Runtime runs on the CPU with only a warning."""
    if CUDA_HERE:
        pytest.skip("onnxruntime-gpu is installed")
    device = SimulatedDevice()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", device)  # type: ignore[misc]
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(
            BackendUnavailableError,
            match=r"would run on CPUExecutionProvider(.|\n)*pip install 'onnxruntime-gpu\[cuda,cudnn\]'",
        ),
    ):
        OnnxRuntimeCudaRunner(open_bundle(bundle_path))
    assert device.left() == {}


@pytest.mark.usefixtures("cuda_on_cpu")
def test_the_graph_for_a_gpu_is_taken_or_else_the_portable_one(
    bundle_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never the CPU's: it computes in float32, and half of its attention is slow on a GPU."""
    caplog.set_level("INFO", logger="hdruntime")
    OnnxRuntimeCudaRunner(open_bundle(bundle_path))
    assert "onnxruntime_cuda runs model.onnx on GPU 0" in caplog.text
    manifest = open_bundle(bundle_path).manifest
    names = ("onnxruntime_cpu", "onnxruntime_cuda")
    lowered = [GraphFile(file=f"{name}.onnx", lowering=name, dtype="float32") for name in names]
    for graph in lowered:
        shutil.copyfile(bundle_path / "model.onnx", bundle_path / graph.file)
    seal(bundle_path, dataclasses.replace(manifest, graphs=(*manifest.graphs, *lowered)))
    OnnxRuntimeCudaRunner(open_bundle(bundle_path))
    assert "onnxruntime_cuda runs onnxruntime_cuda.onnx on GPU 0" in caplog.text


# Padding.


def padded_batches() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Names, ids and masks: one text and three, every padding, and among others a text of padding alone."""
    for tokens, name, ids, mask in cases((1, 2, 15, 16)):
        yield f"{tokens} tokens, {name}", ids, mask
        without_last = mask.copy()
        without_last[-1] = 0
        yield f"{tokens} tokens, {name}, the last text all padding", ids, without_last


def with_graph(path: Path, bundle: Path, change: Callable[[ir.Model], object]) -> Bundle:
    """A copy of a bundle at a path, whose graph for a GPU is the lowered one after a change."""
    shutil.copytree(bundle, path)
    model = ir.load(path / "model.onnx")
    lower_for_onnxruntime_cuda(model)
    change(model)
    ir.save(model, path / "onnxruntime_cuda.onnx")
    manifest = open_bundle(bundle).manifest
    graph = GraphFile(file="onnxruntime_cuda.onnx", lowering="onnxruntime_cuda", dtype=manifest.dtype)
    others = [each for each in manifest.graphs if each.lowering != graph.lowering]
    seal(path, dataclasses.replace(manifest, graphs=(*others, graph)))
    return open_bundle(path)


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("bert", {}),
        ("bert", {"precision": "float16"}),
        ("bert", {"task": "question-answering"}),
        ("longformer", {"precision": "float16"}),
    ],
    ids=["vectors", "in float16", "numbers", "windows in float16"],
)
def test_the_graph_zeroes_padding_as_the_host_does_for_graphs_of_before(
    tiny_bundles, model_type: str, options: dict[str, str], tmp_path: Path
) -> None:
    bundle = tiny_bundles(model_type, **options)
    runner = OnnxRuntimeCudaRunner(open_bundle(bundle.path))
    of_before = with_graph(tmp_path / "before", bundle.path, lambda model: None)
    before, untouched = OnnxRuntimeCudaRunner(of_before), OnnxRuntimeCudaRunner(of_before)
    names = [spec.name for spec in bundle.manifest.outputs]
    assert runner._model.zeroed == set(names), "no host is needed"
    untouched._model.zeroed = frozenset(names)
    nonzero = 0
    for case, ids, mask in padded_batches():
        feeds = inputs_of(bundle, ids, mask)
        zeroed, padded = (each.start(feeds, names)() for each in (runner, untouched))
        with named_case(case):
            for name in names:
                assert (zeroed[name][mask == 0] == 0).all()
                nonzero += np.count_nonzero(padded[name][mask == 0])
            got, right = (each.start(feeds, names)() for each in (runner, before))
            assert {name: values.tobytes() for name, values in got.items()} == {
                name: values.tobytes() for name, values in right.items()
            }
    assert nonzero, "the host has something to do"


def _where(model: ir.Model) -> ir.Node:
    """The node that gives the graph's output."""
    where = model.graph.outputs[0].producer()
    assert where is not None
    assert where.op_type == "Where"
    return where


def _multiply(model: ir.Model) -> None:
    """As if the mask were a factor, which keeps NaN."""
    where = _where(model)
    as_float = ir.node("Cast", where.inputs[:1], {"to": 1})
    product = ir.node("Mul", [where.inputs[1], as_float.outputs[0]])
    model.graph.insert_before(where, [as_float, product])
    for position in (1, 2):
        where.replace_input_with(position, product.outputs[0])


def _swap(model: ir.Model) -> None:
    """As if the mask were 1 for padding."""
    where = _where(model)
    states, zero = where.inputs[1:]
    where.replace_input_with(1, zero)
    where.replace_input_with(2, states)


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize(("wrong", "is_right"), [(None, True), (_multiply, False), (_swap, False)])
def test_nan_at_padding_becomes_0_and_a_graph_that_zeroes_wrongly_is_found(
    bundle_path: Path, tmp_path: Path, wrong: Callable[[ir.Model], None] | None, is_right: bool
) -> None:
    """The host does not cover for the graph."""

    def change(model: ir.Model) -> None:
        zeroing = ZeroPadding()
        zeroing(model)
        assert zeroing.zeroed == ["last_hidden_state"]
        if wrong is not None:
            wrong(model)

    feeds = {"input_ids": np.where(MASK == 0, NAN_ID, IDS), "attention_mask": MASK}
    bundles = with_graph(tmp_path / "new", bundle_path, change), open_bundle(bundle_path)
    runs = (OnnxRuntimeCudaRunner(bundle).start(feeds, ["last_hidden_state"]) for bundle in bundles)
    got, right = (run()["last_hidden_state"] for run in runs)
    assert np.isfinite(right).all()
    assert (got.tobytes() == right.tobytes()) is is_right


def test_options_reach_the_provider() -> None:
    ((name, options), (fallback, _)) = onnxruntime_cuda._providers(GpuOptions(device=1, memory_limit_bytes=2**30), 77)
    assert (name, fallback) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert (options["device_id"], options["gpu_mem_limit"]) == ("1", "1073741824")
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    assert (options["use_tf32"], options["sdpa_kernel"]) == ("0", "19")
    assert options["user_compute_stream"] == "77"
    assert "gpu_mem_limit" not in onnxruntime_cuda._providers(GpuOptions(), 77)[0][1]
    with pytest.raises(InputError, match="memory_limit_bytes is 0; it must be 1 or more"):
        onnxruntime_cuda._providers(GpuOptions(memory_limit_bytes=0), 77)


@pytest.mark.parametrize(
    "said",
    [
        "BFCArena::AllocateRawInternal Available memory of 1024 is smaller than requested bytes of 4096",
        "CUDA failure 2: out of memory ; GPU=0",
        "CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_a_full_gpu_is_an_out_of_memory_error(said: str) -> None:
    error = run_error(RuntimeError(said), 8, 512)
    assert isinstance(error, OutOfMemoryError)
    assert "8 x 512 tokens" in str(error)
    assert not isinstance(
        run_error(RuntimeError("CUDA failure 700: an illegal memory access"), 8, 512), OutOfMemoryError
    )


# On a GPU.

needs_cuda = pytest.mark.skipif(not CUDA_HERE, reason="this ONNX Runtime has no CUDAExecutionProvider")


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_gives_the_cpus_answers(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    with hdruntime.load(bundle, "onnxruntime") as right, hdruntime.load(bundle, "onnxruntime_cuda") as session:
        assert session.backend is Backend.ONNXRUNTIME_CUDA
        expected, got = (one(input_ids=IDS, attention_mask=MASK) for one in (right, session))
        for name, values in expected.items():
            np.testing.assert_allclose(got[name], values, atol=1e-5)


@pytest.mark.gpu
@needs_cuda
def test_auto_takes_the_gpu_if_there_is_no_engine(bundle_path: Path) -> None:
    with hdruntime.load(bundle_path) as session:
        assert session.backend is Backend.ONNXRUNTIME_CUDA


@pytest.mark.gpu
@needs_cuda
def test_a_memory_limit_is_kept(bundle_path: Path) -> None:
    """A batch of 64 MiB of ids does not fit in 16 MiB."""
    limit = GpuOptions(memory_limit_bytes=16 * 2**20)
    runner = OnnxRuntimeCudaRunner(open_bundle(bundle_path), gpu=limit)
    ids = np.full((2**19, 16), 2)
    with pytest.raises(OutOfMemoryError):
        runner.start({"input_ids": ids, "attention_mask": np.ones_like(ids)}, ["last_hidden_state"])()
    with hdruntime.load(bundle_path, "onnxruntime_cuda", gpu=limit) as session:
        assert session(input_ids=IDS)["last_hidden_state"].shape == (3, 4, 4)


def on_gpu(runner: OnnxRuntimeCudaRunner, number: int) -> tuple[dict[str, np.ndarray], Callable[[], np.ndarray]]:
    """A batch of some length and padding, started; and what waits for its hidden states."""
    batch = new_batch(
        1 + number % 3, (1, 7, 16)[number % 3], ("none", "right", "left", "holes", "all")[number % 5], number
    )
    results = runner.start(batch, ["last_hidden_state"])
    return batch, lambda: results()["last_hidden_state"]


def assert_answered(batch: dict[str, np.ndarray], found: np.ndarray) -> None:
    mask = batch["attention_mask"]
    expected = np.where(mask[..., np.newaxis] == 1, hidden_states(batch["input_ids"], mask), 0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_batches_in_flight_of_several_threads_get_their_own_answers(bundle_path: Path) -> None:
    """More runs than go without waiting, on streams of the driver."""
    runner = OnnxRuntimeCudaRunner(open_bundle(bundle_path))

    def work(thread: int) -> None:
        in_flight = []
        for number in range(40):
            in_flight.append(on_gpu(runner, 40 * thread + number))
            if len(in_flight) == runner.max_in_flight:
                batch, results = in_flight.pop(0)
                assert_answered(batch, results())
        for batch, results in in_flight:
            assert_answered(batch, results())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
    runner.close()


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_arrays_of_pytorch_go_in_and_out(bundle_path: Path) -> None:
    """PyTorch computes its inputs late, on a stream of its own, and reads the answers there at once."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'hdexport[export]'")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    runner, side = OnnxRuntimeCudaRunner(open_bundle(bundle_path)), torch.cuda.Stream()
    for number in range(30):
        batch = new_batch(2, 16, ("right", "left", "holes")[number % 3], number)
        with torch.cuda.stream(side):
            torch.cuda._sleep(300_000)
            dtype = (torch.int64, torch.int32)[number % 2]
            given = {name: torch.from_numpy(np.array(values)).to("cuda", dtype) for name, values in batch.items()}
            left = runner.start_on_device(given, ["last_hidden_state"])["last_hidden_state"]
            found = torch.from_dlpack(left).clone()
        side.synchronize()
        assert_answered(batch, found.cpu().numpy())
        other, results = on_gpu(runner, number)
        assert_answered(other, results())
    runner.close()
