"""Bundles in ONNX Runtime on a GPU with compiled kernels, on a stand-in for the driver: see `fakes.stand_in_driver`."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import hdruntime
from fakes.simulated_cuda import SimulatedDriver, write_simulated_kernels
from fakes.simulated_device import FIRST_CONTEXT
from fakes.simulated_onnxruntime import SimulatedProvider
from fakes.stand_in_driver import StandInDriver, build_stand_in
from hdexport.attention.registry import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.engines.build import EngineOptions
from hdexport.graph.targets.onnxruntime import cuda as graph_for_cuda
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
from hdexport.support.bundle_writer import seal
from hdexport.verify.comparison import compare
from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import BlockConfig
from hdplugins.onnxruntime.operators import KernelOperators, library_path
from hdruntime.backends.onnxruntime import cuda as onnxruntime_cuda
from hdruntime.backends.onnxruntime import kernels as onnxruntime_kernels
from hdruntime.backends.onnxruntime.sessions import session_options
from hdruntime.bundle.manifest import Backend, Dtype, Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import BundleCorruptError
from hdruntime.gpu.driver import Gpu
from hdruntime.gpu.options import GpuOptions
from support.comparators import assert_close, named_case
from support.fork_here import said_in_a_fork
from support.interpreted_kernel import Interpreter
from support.tiny_models import VOCAB_SIZE, save_tiny_model

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"),
    pytest.mark.skipif(library_path() is None, reason="the launcher was not built: pip install --editable ."),
]

BLOCK_CONFIG = BlockConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, block_d=32)
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2}
"""Of 32, which kernels are for."""

GROUPED: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "windows": ("bert", "window:5,global:2", HEADS),
    "relative": ("xlnet", None, {"d_model": 64, "n_head": 2, "d_head": 32}),
    "causal, with grouped heads": ("qwen3", None, GROUPED),
}
DENSE = ("bert", None, HEADS)
BOTH_SIDES_GROUPED = ("eurobert", None, GROUPED)
NIGHTLY: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "blocks": ("bert", "bigbird:block=16,random=2", HEADS),
    "hashes": ("bert", "lsh:chunk=16,rounds=2", HEADS),
    "distances": ("nezha", None, HEADS),
    "Longformer": ("longformer", None, HEADS),
    "BigBird": ("big_bird", None, HEADS),
    "Reformer": ("reformer", None, {"attention_head_size": 32, "num_attention_heads": 2}),
    "dense and windows": ("modernbert", None, HEADS),
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("driver"))


def built(
    folder: Path,
    model_type: str,
    attention: str | None,
    changes: Mapping[str, Any],
    *,
    impl: AttentionImpl = AttentionImpl.PLUGIN,
    precision: Dtype = "float32",
) -> Path:
    save_tiny_model(folder / "checkpoint", model_type, Task.FEATURE_EXTRACTION, **changes)
    spec = attention_from_spec(attention)
    build(
        BuildOptions(
            model=folder / "checkpoint", output=folder / "bundle", max_len=64, task=Task.FEATURE_EXTRACTION,
            attention=spec, verify=None, precision=precision, engines=EngineOptions(attention_impl=impl),
        )
    )  # fmt: skip
    return folder / "bundle"


def write_kernels(bundle: Path, architecture: int = 86) -> None:
    """As ``hdexport build --sm`` writes them, for the simulated driver."""
    manifest = open_bundle(bundle, check_files=False).manifest
    for node in manifest.kernel_nodes:
        operator = OPERATORS[node.operator]
        sources = plugin_spec_of(operator).kernel_sources(
            node.shapes,
            node.operator_attributes,
            dtype=manifest.dtype,
            architectures=[architecture],
            block_config=BLOCK_CONFIG,
        )
        write_simulated_kernels(bundle / KERNELS_FOLDER, operator.name, sources)


def batches() -> list[dict[str, np.ndarray]]:
    """Padding behind, before and within texts, a text of padding, and none; batches of 4 and 1."""
    generator = np.random.default_rng(0)
    mask = np.ones((4, 29), np.int64)
    mask[0, 20:], mask[1, :7], mask[2, 9:12], mask[3] = 0, 0, 0, 0
    return [
        {"input_ids": generator.integers(5, VOCAB_SIZE, kept.shape), "attention_mask": kept}
        for kept in (mask, np.ones((1, 17), np.int64), np.ones((1, 1), np.int64))
    ]


@contextlib.contextmanager
def _session(
    bundle: Path, loaded: Path | None = None, *, gpu: int = 0, at_once: bool = False
) -> Iterator[hdruntime.Session]:
    """The backend for a GPU, on this process's stand-in; the graph as ONNX Runtime runs it is written to a file."""
    driver: Any = sys.modules["cuda.bindings.driver"]
    simulated = Gpu(name="simulated", architecture="sm86", memory_bytes=2**34)

    def options_of(threads: int | None) -> Any:
        options = session_options(threads)
        if loaded is not None:
            options.optimized_model_filepath = str(loaded)
        return options

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(onnxruntime_cuda, "session_options", options_of)
        # Our operators are the CPU's here, which runs the simulated provider's graphs.
        patched.setattr(onnxruntime_cuda, "CUDA_PROVIDER", "CPUExecutionProvider")
        provider = SimulatedProvider(driver.memories[gpu], driver)
        provider.at_once = at_once
        provider.install(patched)
        patched.setattr(onnxruntime_cuda, "gpus", lambda: (simulated,) * len(driver.memories))
        opened = open_bundle(bundle, check_files=False)
        runner = onnxruntime_cuda.OnnxRuntimeCudaRunner(opened, gpu=GpuOptions(device=gpu))
        with hdruntime.Session(opened, runner) as session:
            yield session


def _answers(stand_in: Path, bundle: Path, loaded: Path | None = None) -> tuple[list[dict[str, np.ndarray]], list[str]]:
    """The answers, and the kernels that were started."""
    driver = StandInDriver(stand_in)
    with _session(bundle, loaded) as session:
        return [session(**feeds) for feeds in batches()], driver.launches


@pytest.mark.parametrize(
    ("model_type", "attention", "changes"),
    [
        *(pytest.param(*values, id=name) for name, values in MODELS.items()),
        *(pytest.param(*values, id=name, marks=pytest.mark.nightly) for name, values in NIGHTLY.items()),
    ],
)
def test_a_bundle_answers_alike_with_kernels_and_without(
    model_type: str,
    attention: str | None,
    changes: dict[str, Any],
    stand_in: Path,
    interpreter: Interpreter,
    tmp_path: Path,
) -> None:
    bundle = built(tmp_path, model_type, attention, changes)
    by_bodies, launches = interpreter.run(_answers, stand_in, bundle)
    assert not launches
    write_kernels(bundle)
    by_kernels, launches = interpreter.run(_answers, stand_in, bundle)
    manifest = open_bundle(bundle, check_files=False).manifest
    with_kernels = {node.operator for node in manifest.kernel_nodes}
    layers = sum(count for name, count in manifest.operators.items() if name.rpartition("::")[2] in with_kernels)
    assert launches.count("attend") >= layers * len(by_bodies) > 0
    for name in {name for operator in with_kernels for name in plugin_spec_of(OPERATORS[operator]).block_index_kernels}:
        # All layers of these models have one block index.
        assert launches.count(name) == len(by_bodies)
    for bodies, kernels in zip(by_bodies, by_kernels, strict=True):
        assert bodies.keys() == kernels.keys()
        for name, values in bodies.items():
            assert_close(kernels[name], values, atol=2e-5)


def around_tiles() -> list[dict[str, np.ndarray]]:
    """A text without padding, and three of which one has padding before it, one behind it, and one nothing else."""
    generator, feeds = np.random.default_rng(0), list[dict[str, np.ndarray]]()
    for tokens in (1, 15, 16, 17, 32, 33):
        padded = np.ones((3, tokens), np.int64)
        padded[0, : tokens // 3], padded[1, tokens - tokens // 3 :], padded[2] = 0, 0, 0
        for kept in (np.ones((1, tokens), np.int64), padded):
            feeds.append({"input_ids": generator.integers(5, VOCAB_SIZE, kept.shape), "attention_mask": kept})
    return feeds


def _answers_around_tiles(stand_in: Path, bundle: Path, loaded: Path) -> tuple[list[np.ndarray], list[str]]:
    driver = StandInDriver(stand_in)
    with _session(bundle, loaded) as session:
        return [session(**feeds)["last_hidden_state"] for feeds in around_tiles()], driver.launches


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param(DENSE, "float16", id="BERT, float16"),
        pytest.param(BOTH_SIDES_GROUPED, "float32", id="grouped heads, float32"),
        pytest.param(DENSE, "float32", id="BERT, float32", marks=pytest.mark.nightly),
        pytest.param(BOTH_SIDES_GROUPED, "float16", id="grouped heads, float16", marks=pytest.mark.nightly),
        pytest.param(MODELS["causal, with grouped heads"], "float16", id="causal, float16", marks=pytest.mark.nightly),
    ],
)
def test_dense_attention_by_its_kernel_is_right_and_has_no_branch(
    model: tuple[str, str | None, dict[str, Any]],
    precision: Dtype,
    stand_in: Path,
    interpreter: Interpreter,
    tmp_path: Path,
) -> None:
    """One graph serves both ways: the operator that is registered takes the place of the function of its name."""
    bundle = built(tmp_path, *model, precision=precision)
    (node,) = open_bundle(bundle).manifest.kernel_nodes
    with hdruntime.load(bundle, Backend.ONNXRUNTIME, threads=1) as on_cpu:
        expected = [on_cpu(**feeds)["last_hidden_state"] for feeds in around_tiles()]
    ways = {"bodies": {"If", "MultiHeadAttention"}, "kernels": {node.op_type}}
    for way, types in ways.items():
        if way == "kernels":
            write_kernels(bundle)
        loaded = tmp_path / f"{way}.onnx"
        answers, launches = interpreter.run(_answers_around_tiles, stand_in, bundle, loaded)
        assert launches == (["attend"] * 2 * len(answers) if way == "kernels" else [])
        assert types_in(loaded) & {"If", "MultiHeadAttention", node.op_type} == types
        for feeds, found, wanted in zip(around_tiles(), answers, expected, strict=True):
            real = feeds["attention_mask"].astype(bool)
            with named_case(f"{way}, {real.shape}"):
                assert compare(found[real], wanted[real], half_precision=precision != "float32").passed
                assert not found[~real].any()


def test_where_onnx_runtime_s_own_is_kept_kernels_compute_other_attention(
    stand_in: Path, interpreter: Interpreter, tmp_path: Path
) -> None:
    """The default, but for GPUs on which the kernel of dense attention is known to be faster."""
    bundle = built(tmp_path, *NIGHTLY["dense and windows"], impl=AttentionImpl.AUTO)
    by_bodies, _ = interpreter.run(_answers, stand_in, bundle)
    write_kernels(bundle)
    by_kernels, launches = interpreter.run(_answers, stand_in, bundle, tmp_path / "loaded.onnx")
    manifest = open_bundle(bundle, check_files=False).manifest
    assert {node.operator for node in manifest.kernel_nodes} == {"SlidingWindowAttention"}
    assert launches.count("attend") == manifest.operators["hdexport::SlidingWindowAttention"] * len(by_bodies)
    types = types_in(tmp_path / "loaded.onnx")
    assert types >= {"If", "MultiHeadAttention"}
    assert {name.partition("_")[0] for name in types if "Attention_" in name} == {"SlidingWindowAttention"}
    assert "DenseAttention" not in types
    for bodies, kernels in zip(by_bodies, by_kernels, strict=True):
        assert_close(kernels["last_hidden_state"], bodies["last_hidden_state"], atol=2e-5)


@pytest.mark.parametrize("impl", [AttentionImpl.AUTO, pytest.param(AttentionImpl.PLUGIN, marks=pytest.mark.nightly)])
def test_kernels_compute_long_texts_by_shared_numbers_or_all(
    impl: AttentionImpl, stand_in: Path, interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 16 tokens here, so that MPNet's texts are of both kinds."""
    monkeypatch.setattr(graph_for_cuda, "_LONGEST_BIASED", 16)
    bundle = built(tmp_path, "mpnet", None, HEADS, impl=impl)
    by_bodies, _ = interpreter.run(_answers, stand_in, bundle)
    write_kernels(bundle)
    by_kernels, launches = interpreter.run(_answers, stand_in, bundle, tmp_path / "loaded.onnx")
    are_all = impl is AttentionImpl.PLUGIN
    computed = [feeds for feeds in batches() if are_all or feeds["input_ids"].shape[1] > 16]
    assert launches == ["attend"] * 2 * len(computed)
    assert ("If" in types_in(tmp_path / "loaded.onnx")) is not are_all
    for bodies, kernels in zip(by_bodies, by_kernels, strict=True):
        assert_close(kernels["last_hidden_state"], bodies["last_hidden_state"], atol=2e-5)


def types_in(path: Path) -> set[str]:
    """The types of a graph's nodes, those of branches too."""
    return {node.op_type for node in ir.load(path).graph.all_nodes()}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = built(tmp_path_factory.mktemp("windowed"), *MODELS["windows"])
    write_kernels(bundle)
    return bundle


def _in_a_fork(stand_in: Path, bundle: Path) -> list[str]:
    StandInDriver(stand_in)
    feeds = batches()[1]
    with _session(bundle) as session:
        session(**feeds)

        def child() -> Iterator[str]:
            for use in (lambda: session(**feeds), lambda: hdruntime.load(bundle, Backend.ONNXRUNTIME_CUDA)):
                with pytest.raises(hdruntime.BackendError) as error:
                    use()
                yield str(error.value).splitlines()[0]
            with hdruntime.load(bundle, Backend.ONNXRUNTIME, threads=1) as another:
                yield str(another(**feeds)["last_hidden_state"].shape)

        return [*said_in_a_fork(child), f"parent: {session(**feeds)['last_hidden_state'].shape}"]


def test_a_fork_has_neither_the_session_nor_the_gpu(windowed: Path, stand_in: Path, interpreter: Interpreter) -> None:
    refused, no_gpu, by_cpu, parent = interpreter.run(_in_a_fork, stand_in, windowed)
    assert "This session was loaded in another process" in refused
    assert "This process was forked from a process that has used CUDA, and CUDA does not start in a fork." in no_gpu
    assert (by_cpu, parent) == ("(1, 17, 64)", "parent: (1, 17, 64)")


def _on_two_gpus(
    stand_in: Path, bundle: Path
) -> tuple[dict[tuple[int, int], list[np.ndarray]], list[str], Counter[int], Counter[int]]:
    """(Thread, GPU) -> answers; faults; contexts -> the kernels that were loaded there, and the launches."""
    driver = StandInDriver(stand_in, context=0, gpus=2)
    answers: dict[tuple[int, int], list[np.ndarray]] = {}
    together = threading.Barrier(3)
    with _session(bundle) as first, _session(bundle, gpu=1) as second:
        sessions = first, second

        def work(thread: int) -> None:
            together.wait()
            for turn, feeds in enumerate(batches()[:2] * 2):
                gpu = (thread + turn) % 2
                answers.setdefault((thread, gpu), []).append(sessions[gpu](**feeds)["last_hidden_state"])

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(work, range(3))) == [None] * 3
    return answers, [fault for each in driver.memories for fault in each.faults], driver.loaded, driver.launched_in


def test_threads_use_two_sessions_on_two_gpus_each_in_its_context(
    windowed: Path, stand_in: Path, interpreter: Interpreter
) -> None:
    expected, launches = interpreter.run(_answers, stand_in, windowed)
    answers, faults, loaded, launched = interpreter.run(_on_two_gpus, stand_in, windowed)
    assert faults == []
    for (thread, gpu), found in answers.items():
        for values in found:
            # A thread's turns go to the GPUs by turns, and so do the two batches.
            assert np.array_equal(values, expected[(thread + gpu) % 2]["last_hidden_state"])
    kernels = len(plugin_spec_of(OPERATORS["SlidingWindowAttention"]).kernels)
    assert loaded == Counter({FIRST_CONTEXT: kernels, FIRST_CONTEXT + 1: kernels})
    # Of six calls each, of as many launches as one of three.
    assert launched == Counter(dict.fromkeys(loaded, 2 * len(launches)))


REFUSALS = {
    "cuInit": 3, "cuCtxGetDevice": 201, "cuDeviceGetAttribute": 1, "cuModuleLoadData": 209, "cuModuleGetFunction": 500,
    "cuFuncSetAttribute": 1, "cuLaunchKernel": 719, "cuCtxGetCurrent": 201,
}  # fmt: skip
"""Each call that a launch needs, in their order, as what succeeded is not tried again; and a code of refusal."""


def _refused(stand_in: Path, bundle: Path) -> tuple[dict[str, str], tuple[int, ...], list[str]]:
    """Call -> the error of a batch; the shape of the same batch's answer after that, and the calls of all."""
    driver, feeds, said = StandInDriver(stand_in), batches()[1], {}
    with _session(bundle, at_once=True) as session:
        for call, code in REFUSALS.items():
            driver.refuse(call, code)
            with pytest.raises(hdruntime.BackendError) as error:
                session(**feeds)
            said[call] = str(error.value)
        driver.refuse("", 0)
        return said, session(**feeds)["last_hidden_state"].shape, driver.calls


def test_a_driver_that_refuses_a_call_is_an_error_with_operator_and_shape_after_which_the_session_lives(
    windowed: Path, stand_in: Path, interpreter: Interpreter
) -> None:
    said, shape, calls = interpreter.run(_refused, stand_in, windowed)
    assert shape == (1, 17, 64)
    assert said.keys() == {call for call in calls if call in dir(SimulatedDriver)}
    for call, text in said.items():
        what = "launch 0" if call == "cuLaunchKernel" else call
        with named_case(text):
            assert "ONNX Runtime failed on a batch of 1 x 17 tokens: " in text
            assert re.search(
                rf"SlidingWindowAttention\w* on \[1, 17, 2, 32\]: CUDA error {REFUSALS[call]} at {what}\b", text
            )
    assert re.search(r"of .*/kernels/.*\.cubin: .*\nUpdate NVIDIA's driver", said["cuModuleLoadData"])


# What keeps a session from kernels.


@pytest.mark.parametrize(
    ("architecture", "launcher", "message"),
    [
        (86, None, None),
        (89, None, None),
        (
            90,
            None,
            "This GPU is an sm_90; .* is for sm_86.\nCompile .*: hdexport rebuild .*/bundle --target onnx --sm 90",
        ),
        (
            86,
            "is another version's",
            "the library that launches kernels is another version's; build it with: pip install --force-reinstall",
        ),
    ],
)
def test_operators_are_registered_only_where_all_that_they_need_is_there(
    architecture: int,
    launcher: str | None,
    message: str | None,
    windowed: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if launcher is not None:
        monkeypatch.setattr(onnxruntime_kernels, "launcher_unavailable_reason", lambda: launcher)
    registered: list[str] = []

    class Options:
        def register_custom_ops_library(self, path: str) -> None:
            registered.append(path)

    with caplog.at_level(logging.INFO):
        uses = onnxruntime_kernels.use_kernels(
            open_bundle(windowed, check_files=False),
            Options(),
            architecture=architecture,
            provider="CPUExecutionProvider",
        )
    assert uses is (message is None) is bool(registered)
    said = caplog.text
    if message is None:
        assert f"kernels for sm_{architecture} compute SlidingWindowAttention" in said
    else:
        assert "attention runs without compiled kernels on the GPU, which is slower" in said
        assert re.search(message, said, re.DOTALL)


@pytest.mark.parametrize(
    ("architecture", "registers", "warns"), [(86, True, False), (90, False, True), (120, False, False)]
)
def test_nodes_that_kernels_are_to_compute_on_other_gpus_are_not_looked_for(
    architecture: int,
    registers: bool,
    warns: bool,
    windowed: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The windows' kernels are for sm_86 alone."""
    opened = open_bundle(windowed, check_files=False)
    nodes = tuple(replace(node, architectures=("sm86", "sm90")) for node in opened.manifest.kernel_nodes)
    registered: list[object] = []
    monkeypatch.setattr(KernelOperators, "register", lambda self, options: registered.append(options))
    uses = onnxruntime_kernels.use_kernels(
        Bundle(opened.path, replace(opened.manifest, kernel_nodes=nodes)), None, architecture=architecture, provider=""
    )
    assert (uses, bool(registered), "attention runs without" in caplog.text) == (registers, registers, warns)


def test_no_operator_is_registered_of_which_a_node_is_left_to_the_body(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be in the place of that node's function, too."""
    opened = open_bundle(windowed, check_files=False)
    (node, *_) = opened.manifest.kernel_nodes
    nodes = tuple(replace(node, architectures=(name,)) for name in ("sm86", "sm90"))
    monkeypatch.setattr(KernelOperators, "register", lambda self, options: pytest.fail("registered"))
    bundle = Bundle(opened.path, replace(opened.manifest, kernel_nodes=nodes))
    assert not onnxruntime_kernels.use_kernels(bundle, None, architecture=86, provider="")


def test_a_damaged_kernel_leaves_attention_to_the_bodies(
    windowed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = shutil.copytree(windowed, tmp_path / "bundle")
    next((bundle / KERNELS_FOLDER).glob("*attend*.cubin")).write_bytes(b"damaged")
    assert not onnxruntime_kernels.use_kernels(
        open_bundle(bundle, check_files=False), None, architecture=86, provider="CPUExecutionProvider"
    )
    assert "is not the file that" in caplog.text


def test_a_bundle_whose_kernel_was_cut_off_is_refused(windowed: Path, tmp_path: Path) -> None:
    sealed = tmp_path / "bundle"
    manifest = open_bundle(shutil.copytree(windowed, sealed), check_files=False).manifest
    seal(sealed, manifest)
    open_bundle(sealed)
    cubin = next((sealed / KERNELS_FOLDER).glob("*attend*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with pytest.raises(BundleCorruptError, match=f"{cubin.name} of the bundle .* has changed: .*\n.*opy"):
        hdruntime.load(sealed, Backend.ONNXRUNTIME_CUDA)


def test_heads_that_kernels_are_not_for_are_left_to_the_bodies(tmp_path: Path) -> None:
    bundle = built(tmp_path, "bert", "window:5", {"hidden_size": 64, "num_attention_heads": 4})
    manifest = open_bundle(bundle).manifest
    assert manifest.operators == {"hdexport::SlidingWindowAttention": 2}
    assert manifest.kernel_nodes == ()
