"""Bundles in ONNX Runtime on a GPU with compiled kernels, on a stand-in for the driver: see `fakes.stand_in_driver`."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from fakes.simulated_cuda import write_simulated_kernels
from fakes.simulated_onnxruntime import SimulatedProvider
from fakes.stand_in_driver import StandInDriver, build_stand_in
from hdexport.attention.kinds import attention_from_spec
from hdexport.build import BuildOptions, build
from hdplugins import OPERATORS
from hdplugins.attention.plugin_face import face_of
from hdplugins.kernels.attention_tiles import Tiles
from hdplugins.onnxruntime.operators import library_path
from hdruntime.backends.onnxruntime import cuda as onnxruntime_cuda
from hdruntime.backends.onnxruntime import kernels as onnxruntime_kernels
from hdruntime.bundle.manifest import Backend, Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.gpu.driver import Gpu
from support.comparators import assert_close
from support.fork_here import said_in_a_fork
from support.interpreted_kernel import Interpreter
from support.tiny_models import VOCAB_SIZE, save_tiny_model

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"),
    pytest.mark.skipif(library_path() is None, reason="the launcher was not built: pip install --editable ."),
]

TILES = Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32)
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2}
"""Of 32, which kernels are for."""

MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "windows": ("bert", "window:5,global:2", HEADS),
    "relative": ("xlnet", None, {"d_model": 64, "n_head": 2, "d_head": 32}),
}
NIGHTLY: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "blocks": ("bert", "bigbird:block=16,random=2", HEADS),
    "hashes": ("bert", "lsh:chunk=16,rounds=2", HEADS),
    # MPNet's numbers are shared: a bias for ONNX Runtime's own attention, up to 2048 tokens.
    "distances": ("nezha", None, HEADS),
    "Longformer": ("longformer", None, HEADS),
    "BigBird": ("big_bird", None, HEADS),
    "Reformer": ("reformer", None, {"attention_head_size": 32, "num_attention_heads": 2}),
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("driver"))


def built(folder: Path, model_type: str, attention: str | None, changes: Mapping[str, Any]) -> Path:
    save_tiny_model(folder / "checkpoint", model_type, Task.FEATURE_EXTRACTION, **changes)
    spec = attention_from_spec(attention)
    build(
        BuildOptions(
            model=folder / "checkpoint", output=folder / "bundle", max_len=64, task=Task.FEATURE_EXTRACTION,
            attention=spec, verify=None,
        )
    )  # fmt: skip
    return folder / "bundle"


def write_kernels(bundle: Path, architecture: int = 86) -> None:
    """As ``hdexport build --sm`` writes them, for the simulated driver."""
    manifest = open_bundle(bundle, check_files=False).manifest
    for node in manifest.kernel_nodes:
        operator = OPERATORS[node.operator]
        attributes = {
            name: tuple(value) if isinstance(value, list) else value for name, value in node.attributes.items()
        }
        sources = face_of(operator).kernel_sources(
            node.shapes, attributes, dtype=manifest.dtype, architectures=[architecture], tiles=TILES
        )
        write_simulated_kernels(bundle / KERNELS_FOLDER, operator.name, sources)


def batches() -> list[dict[str, np.ndarray]]:
    """Padding behind, before and within texts, and none; batches of 3 and 1."""
    generator = np.random.default_rng(0)
    mask = np.ones((3, 29), np.int64)
    mask[0, 20:], mask[1, :7], mask[2, 9:12] = 0, 0, 0
    return [
        {"input_ids": generator.integers(5, VOCAB_SIZE, kept.shape), "attention_mask": kept}
        for kept in (mask, np.ones((1, 17), np.int64), np.ones((1, 1), np.int64))
    ]


@contextlib.contextmanager
def _session(bundle: Path) -> Iterator[hdruntime.Session]:
    """The backend for a GPU, on this process's stand-in."""
    driver: Any = sys.modules["cuda.bindings.driver"]
    with pytest.MonkeyPatch.context() as patched:
        # Our operators are the CPU's here, which runs the simulated provider's graphs.
        patched.setattr(onnxruntime_cuda, "CUDA_PROVIDER", "CPUExecutionProvider")
        SimulatedProvider(driver.memory, driver).install(patched)
        patched.setattr(
            onnxruntime_cuda, "gpus", lambda: (Gpu(name="simulated", architecture="sm86", memory_bytes=2**34),)
        )
        opened = open_bundle(bundle, check_files=False)
        with hdruntime.Session(opened, onnxruntime_cuda.OnnxRuntimeCudaRunner(opened)) as session:
            yield session


def _answers(stand_in: Path, bundle: Path) -> tuple[list[dict[str, np.ndarray]], list[str]]:
    """The answers, and the kernels that were started."""
    driver = StandInDriver(stand_in)
    with _session(bundle) as session:
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
    for name in {name for operator in with_kernels for name in face_of(OPERATORS[operator]).planning_kernels}:
        # All layers of these models have one plan.
        assert launches.count(name) == len(by_bodies)
    for bodies, kernels in zip(by_bodies, by_kernels, strict=True):
        assert bodies.keys() == kernels.keys()
        for name, values in bodies.items():
            assert_close(kernels[name], values, atol=2e-5)


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
    assert "this process was forked from one that has used CUDA, which does not start in a fork" in no_gpu
    assert (by_cpu, parent) == ("(1, 17, 64)", "parent: (1, 17, 64)")


# What keeps a session from kernels.


@pytest.mark.parametrize(
    ("architecture", "launcher", "message"),
    [
        (86, None, None),
        (89, None, None),
        (
            90,
            None,
            "This GPU is an sm_90; .* is for sm_86.\nCompile .* for this GPU: hdexport rebuild .*/bundle --sm 90",
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
        monkeypatch.setattr(onnxruntime_kernels, "why_no_launcher", lambda: launcher)
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
        assert "attention runs by standard operators on the GPU, which is slower" in said
        assert re.search(message, said, re.DOTALL)


def test_a_damaged_kernel_leaves_attention_to_the_bodies(
    windowed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = shutil.copytree(windowed, tmp_path / "bundle")
    next((bundle / KERNELS_FOLDER).glob("*attend*.cubin")).write_bytes(b"damaged")
    assert not onnxruntime_kernels.use_kernels(
        open_bundle(bundle, check_files=False), None, architecture=86, provider="CPUExecutionProvider"
    )
    assert "is not the file that" in caplog.text


def test_heads_that_kernels_are_not_for_are_left_to_the_bodies(tmp_path: Path) -> None:
    bundle = built(tmp_path, "bert", "window:5", {"hidden_size": 64, "num_attention_heads": 4})
    manifest = open_bundle(bundle).manifest
    assert manifest.operators == {"hdexport::SlidingWindowAttention": 2}
    assert manifest.kernel_nodes == ()
