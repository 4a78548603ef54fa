"""Engines: real ones of TensorRT-RTX, built without a GPU, and everything that stops a build."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from hdexport.graph.targets.tensorrt.builder import build_engine
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl, tensorrt_graph
from hdexport.graph.targets.tensorrt.packages import (
    EngineTarget,
    architectures_from_option,
    load_polygraphy,
    load_variant,
)
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options, with_memory
from hdexport.graph.targets.tensorrt.target import TensorRtTarget
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.errors import EngineError, InputError, MissingDependencyError
from hdruntime.gpu import driver as gpu
from support.attention_graphs import portable_graph
from support.needs import needs_rtx
from support.onnx_models import parsed_model
from support.operators.window import Window

_POSITIONS = 300
"""Of the tiny bundles."""

_WINDOW = Window(left=16, right=16, bound=4, dilation=(1, 3), dtype="float16")


def _windowed(layers: int) -> ir.Model:
    return portable_graph(*[_WINDOW] * layers, dtype=TensorProto.FLOAT16)


@pytest.fixture(scope="module")
def onnx_path(tiny_bundles: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT's lowered graph, its weights in a file of their own."""
    path = tmp_path_factory.mktemp("onnx") / "tensorrt.onnx"
    model = tensorrt_graph(tiny_bundles("bert", precision="float16").graph, dtype="float16")
    ir.save(model, path, external_data="model.onnx.data")
    return path


def _build(
    onnx_path: Path, bundle: Path, *, max_len: int = _POSITIONS, architectures: Sequence[str] = (), **options: object
) -> EngineFile:
    arguments: dict[str, object] = {"profiles": profiles_from_options(max_len), "precision": "float16", **options}
    target = EngineTarget(Backend.TENSORRT_RTX, architectures)
    return build_engine(onnx_path, bundle / "engines" / "float16.engine", target, bundle=bundle, **arguments)  # type: ignore[arg-type]


def _files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


@dataclasses.dataclass(frozen=True)
class Built:
    """An engine, the folder of its bundle, and the steps that its build reported."""

    folder: Path
    engine: EngineFile
    steps: Sequence[tuple[str, int, int]]


@pytest.fixture(scope="module")
def built(onnx_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An engine of three buckets for two architectures."""
    folder = tmp_path_factory.mktemp("built")
    profiles = profiles_from_options(_POSITIONS, profiles="17,64,256", batch="1:2:4")
    steps: list[tuple[str, int, int]] = []
    report = {"progress": lambda *step: steps.append(step)}
    engine = _build(onnx_path, folder, profiles=profiles, architectures=("sm89", "sm120"), **report)
    return Built(folder, engine, steps)


@needs_rtx
def test_an_engine_is_built_with_a_profile_a_bucket(built: Built, onnx_path: Path) -> None:
    assert built.engine.file == "engines/float16.engine"
    assert built.engine.metadata == "engines/float16.json"
    assert built.engine.profiles == profiles_from_options(_POSITIONS, profiles="17,64,256", batch="1:2:4")
    assert _files(built.folder) == ["engines/float16.engine", "engines/float16.json"]
    weights = onnx_path.with_name("model.onnx.data")
    assert (built.folder / built.engine.file).stat().st_size > weights.stat().st_size


@needs_rtx
def test_the_metadata_says_what_the_engine_is_and_comes_from(built: Built, onnx_path: Path) -> None:
    trt, engine = load_variant(Backend.TENSORRT_RTX), built.engine
    metadata = json.loads((built.folder / engine.metadata).read_text())
    weights = onnx_path.with_name("model.onnx.data")
    assert metadata["variant"] == engine.variant == "tensorrt_rtx"
    assert metadata["version"] == engine.version == trt.__version__
    assert metadata["precision"] == "float16"
    assert tuple(metadata["architectures"]) == engine.architectures == ("sm89", "sm120")
    assert [profile["tokens"] for profile in metadata["profiles"]] == [
        list(profile.tokens) for profile in engine.profiles
    ]
    assert {tuple(profile["batch"]) for profile in metadata["profiles"]} == {(1, 2, 4)}
    assert {profile["memory"] for profile in metadata["profiles"]} == {None}
    assert metadata["plugins"] == {}
    assert metadata["engine_sha256"] == hashlib.sha256((built.folder / engine.file).read_bytes()).hexdigest()
    assert metadata["onnx_sha256"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (onnx_path, weights)
    }
    assert metadata["built_on"]["driver"] == gpu.driver_version()
    assert set(metadata["built_on"]) == {"platform", "driver", "gpu", "date"}


@needs_rtx
@pytest.mark.parametrize(("impl", "layers", "plugins"), [(AttentionImpl.PLUGIN, 3, 3), (AttentionImpl.NATIVE, 1, 0)])
def test_windowed_layers_are_plugin_layers_only_if_requested(
    impl: AttentionImpl, layers: int, plugins: int, tmp_path: Path
) -> None:
    path = tmp_path / "tensorrt.onnx"
    ir.save(tensorrt_graph(_windowed(layers), dtype="float16", attention_impl=impl), path)
    # TensorRT-RTX checks shapes at the best ones alone: none of these is a window's or a block's length.
    profiles = profiles_from_options(_POSITIONS, profiles="37,101,251", batch="1:2:3")
    engine = _build(path, tmp_path, profiles=profiles)
    metadata = json.loads((tmp_path / engine.metadata).read_text())
    assert metadata["plugins"] == ({"SlidingWindowAttention": plugins} if plugins else {})
    # The name of a plugin's field, which the engine must hold to make the plugin again.
    assert (b"global_bound" in (tmp_path / engine.file).read_bytes()) == (plugins > 0)


_REFUSED_WHILE_BUILDING = """
import sys
from pathlib import Path
import onnx_ir as ir
from hdexport.graph.targets.tensorrt.builder import build_engine
from hdexport.engines.build import EngineOptions
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import EngineError
folder = Path(sys.argv[1])
for attempt in range(2):
    for graph in sorted(folder.glob("*.onnx")):
        try:
            build_engine(graph, folder / "x.engine", EngineTarget(Backend.TENSORRT_RTX), bundle=folder,
                         profiles=profiles_from_options(64), precision="float16")
        except EngineError as error:
            print(str(error).splitlines()[0])
"""


@needs_rtx
def test_what_a_plugin_refuses_is_reported_and_the_process_lives(tmp_path: Path) -> None:
    """In a process of its own, for TensorRT-RTX 1.7.1 by itself dies of a plugin that refuses a build."""
    refused: tuple[tuple[str, object, str], ...] = (
        ("dilation", [1, 2, 3], "dilation is [1, 2, 3]; it must have 1 value or 2"),
        ("left", -3, "left is -3; it must be 0 or more"),
        ("scale", None, "the fields left, right, dilation, global_bound were given"),
    )
    for name, value, _ in refused:
        model = tensorrt_graph(_windowed(1), dtype="float16")
        (node,) = (node for node in model.graph if node.domain == "hdexport")
        del node.attributes[name]
        if value is not None:
            node.attributes[name] = ir.convenience.convert_attribute(name, value)
        ir.save(model, tmp_path / f"{name}.onnx")
    before = _files(tmp_path)
    command = [sys.executable, "-c", _REFUSED_WHILE_BUILDING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(refused)
    for line, (*_, message) in zip(lines, refused * 2, strict=True):
        assert f"TensorRT did not build the engine: SlidingWindowAttention: {message}" in line
    assert _files(tmp_path) == before


@needs_rtx
def test_a_build_for_other_gpus_asks_for_no_cache_of_timings_on_this_machines(
    onnx_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of timings is made for the GPU at hand, which TensorRT-RTX may not know: Hopper, for 1.7.1."""

    def refuse(config: Any, content: bytes) -> None:
        raise AssertionError("there is no such GPU")

    monkeypatch.setattr(load_variant(Backend.TENSORRT_RTX).IBuilderConfig, "create_timing_cache", refuse)
    assert _build(onnx_path, tmp_path, profiles=profiles_from_options(8), architectures=["sm89"]).file


@pytest.fixture
def remembering(tmp_path: Path) -> Path:
    """A graph with a memory of tokens, 50 at most, and one of 3 numbers."""
    nodes = """
        own = Gather(table, input_ids)
        size = Shape<start = 1, end = 2>(memory)
        rows = Slice(table, zero, size, zero)
        remembered = Add(memory, rows)
        all = Concat<axis = 1>(remembered, own)
        tokens = Shape<start = 1, end = 2>(input_ids)
        new_memory = Slice(all, tokens, end, one)
        mean = ReduceMean(all, one)
        counted = ReduceSum<keepdims = 1>(counts, one)
        count = Unsqueeze(counted, one)
        states = Add(own, mean)
        result = Add(states, count)
    """
    shapes = {"input_ids": "int64[batch, tokens]", "memory": "float[batch, memory, 8]", "counts": "float[batch, 3]"}
    outputs = {"result": "float[batch, tokens, 8]", "new_memory": "float[batch, memory, 8]"}
    constants = {"table": np.ones((50, 8), np.float32), "zero": [0], "one": [1], "end": [2**31]}
    path = tmp_path / "remembering.onnx"
    onnx.save(parsed_model(shapes, outputs, nodes, constants), path)
    return path


@needs_rtx
def test_the_tokens_of_a_memory_have_sizes_of_their_own(remembering: Path, tmp_path: Path) -> None:
    profiles = with_memory(profiles_from_options(99, profiles="17,99", batch="1:2:3"), most=50)
    engine = _build(remembering, tmp_path, profiles=profiles, precision="float32")
    assert [profile.memory for profile in engine.profiles] == [(1, 50, 50)] * 2
    metadata = json.loads((tmp_path / engine.metadata).read_text())
    assert [profile["memory"] for profile in metadata["profiles"]] == [[1, 50, 50]] * 2


@needs_rtx
def test_a_broken_graph_is_an_error_of_ours(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not ONNX")
    with pytest.raises(EngineError, match=r"TensorRT did not build the engine: .+\n.*targets='onnx'"):
        _build(broken, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@needs_rtx
def test_a_failed_build_leaves_the_old_engine(onnx_path: Path, tmp_path: Path) -> None:
    engine = _build(onnx_path, tmp_path, profiles=profiles_from_options(8))
    before = (tmp_path / engine.file).read_bytes()
    with pytest.raises(EngineError, match=r"1 to 8 sequences of 1 to 301 tokens: .*\n.*max_len=301.*profiles"):
        _build(onnx_path, tmp_path, max_len=_POSITIONS + 1)
    assert (tmp_path / engine.file).read_bytes() == before
    assert _files(tmp_path) == ["engines/float16.engine", "engines/float16.json"]


_STOPPED = """
import os, signal, sys
from pathlib import Path

from hdexport.cli.process import exit_code, stopped_like_interrupted
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdexport.graph.targets.tensorrt.builder import build_engine
from hdruntime.bundle.manifest import Backend

folder = Path(sys.argv[2])
for number in (signal.SIGINT, signal.SIGTERM):
    calls = 0

    def press_ctrl_c(phase, done, total):
        global calls
        calls += 1
        if calls == 10:
            os.kill(os.getpid(), number)

    with stopped_like_interrupted():
        before = signal.getsignal(number)
        try:
            build_engine(Path(sys.argv[1]), folder / "x.engine", EngineTarget(Backend.TENSORRT_RTX), bundle=folder,
                         profiles=profiles_from_options(256), precision="float16", progress=press_ctrl_c)
        except KeyboardInterrupt as stop:
            print(exit_code(stop), signal.getsignal(number) is before)
"""


@needs_rtx
def test_ctrl_c_and_its_like_stop_a_build(onnx_path: Path, tmp_path: Path) -> None:
    """In a process of its own: what other tests' libraries have made of signals once ended the tests' process."""
    command = [sys.executable, "-c", _STOPPED, str(onnx_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["130 True", "143 True"]
    assert _files(tmp_path) == []


@needs_rtx
def test_ctrl_c_that_is_ignored_stays_so(onnx_path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    profiles = profiles_from_options(8)
    _build(onnx_path, tmp_path, profiles=profiles, progress=lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@needs_rtx
@pytest.mark.parametrize("is_refused", [False, True])
def test_an_engine_leaves_memory_to_its_caller_unless_that_is_refused_and_has_no_tf32(
    is_refused: bool, onnx_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream is captured only where an engine allocates nothing; TF32 has 10 bits of mantissa, float32 has 23."""
    import tensorrt_rtx as trt
    from polygraphy.exception import PolygraphyException

    backend, user_allocation = load_polygraphy(Backend.TENSORRT_RTX), []
    build = backend.engine_bytes_from_network

    def recorded(network: Any, config: Any) -> Any:
        made = config(network[0], network[1])
        assert not made.get_flag(trt.BuilderFlag.TF32)
        assert made.get_preview_feature(trt.PreviewFeature.RUNTIME_ACTIVATION_RESIZE_10_10)
        user_allocation.append(made.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION))
        if is_refused and user_allocation[-1]:
            raise PolygraphyException("a layer allocates")
        return build(network, config=made)

    monkeypatch.setattr(backend, "engine_bytes_from_network", recorded)
    _build(onnx_path, tmp_path, profiles=profiles_from_options(8))
    assert user_allocation == ([True, False] if is_refused else [True])
    if not is_refused:
        assert caplog.text == ""
        return
    assert "The engine cannot be captured into CUDA graphs. TensorRT did not build the engine: a layer" in caplog.text


@needs_rtx
def test_an_error_while_reporting_progress_reaches_the_caller(onnx_path: Path, tmp_path: Path) -> None:
    def report(phase: str, done: int, total: int) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        _build(onnx_path, tmp_path, progress=report)
    assert _files(tmp_path) == []


@needs_rtx
def test_a_plain_build_prints_and_warns_nothing_and_is_for_all_architectures_but_turing(
    onnx_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = _build(onnx_path, tmp_path, profiles=profiles_from_options(8))
    printed = capfd.readouterr()
    assert (printed.out, printed.err, caplog.text) == ("", "", "")
    assert engine.architectures == EngineTarget(Backend.TENSORRT_RTX).architectures
    assert {"sm80", "sm86", "sm89", "sm120"} <= set(engine.architectures)
    assert "sm75" not in engine.architectures


@needs_rtx
def test_a_package_that_does_not_load_is_distinguished_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr("hdexport.graph.targets.tensorrt.packages.require", fail)
    with pytest.raises(EngineError, match=r"tensorrt_rtx is installed but does not load: libnvinfer.*\n.*doctor"):
        load_variant(Backend.TENSORRT_RTX)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_tensorrt_that_is_not_installed_names_the_command() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install 'hdexport\[tensorrt\]'"):
        EngineTarget(Backend.TENSORRT)
    assert not TensorRtTarget().is_possible()


@pytest.mark.skipif(bool(gpu.gpus()), reason="there is a GPU")
def test_tensorrt_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the package is simulated; the missing GPU is real.
    monkeypatch.setattr("hdexport.graph.targets.tensorrt.packages.require", lambda name: object())
    with pytest.raises(EngineError, match=r"CUDA finds no GPU .*\n.*targets='tensorrt-rtx'"):
        EngineTarget(Backend.TENSORRT)


@pytest.mark.parametrize(("text", "names"), [(None, ()), ("8.6,sm89, sm_120", ("sm86", "sm89", "sm120"))])
def test_architectures_are_understood_as_users_write_them(text: str | None, names: tuple[str, ...]) -> None:
    assert architectures_from_option(text) == names


def test_invalid_architectures_are_refused() -> None:
    for text in ("", "ampere", "80,,86", "8.6.1"):
        with pytest.raises(InputError, match=r"architectures is .*; it must be .*86,89"):
            pytest.fail(f"{text!r} gives {architectures_from_option(text)}")
