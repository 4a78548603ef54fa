"""Kernels of a bundle: compiled for the GPUs of its engines, and loaded by the plugins that need them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from hdexport.engines.build import EngineOptions
from hdexport.graph.targets.tensorrt.kernels import write_kernels
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl, tensorrt_graph
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdexport.graph.targets.tensorrt.plugin_nodes import own_shapes, plugin_nodes
from hdexport.lowering.kernel_nodes import kernel_node, kernel_records
from hdexport.lowering.nodes import operator_nodes
from hdexport.lowering.relative_position_bias import LONG_SEQUENCES
from hdplugins.attention.window.plugin import PLUGIN_SPEC
from hdplugins.kernels.aot import KernelError, read_kernel
from hdplugins.kernels.cuda_launch import find_kernels
from hdruntime.bundle.manifest import Backend, KernelNode
from hdruntime.errors import ExportError, InputError, MissingDependencyError
from support.attention_graphs import attention_model
from support.attention_layers import Layer
from support.operators.dense import Dense
from support.operators.distance import Clipped
from support.operators.window import Window

WINDOW = Window(left=16, right=16, bound=4, dtype="float16")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def nodes() -> list[KernelNode]:
    graph = tensorrt_graph(attention_model(WINDOW, WINDOW, WINDOW), dtype="float16")
    return [kernel_node(node, own_shapes(node)) for node in plugin_nodes(graph)]


@needs_triton
def test_a_bundle_gets_the_kernels_of_its_engines_each_once(nodes: list[KernelNode], tmp_path: Path) -> None:
    said: list[str] = []
    files = write_kernels(
        nodes, tmp_path, dtype="float16", architectures=("sm86", "sm89", "sm120"), progress=said.append
    )
    assert sorted(files) == sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    kernels = [read_kernel(tmp_path / file) for file in files if file.endswith(".json")]
    assert {kernel.cubin.relative_to(tmp_path).as_posix() for kernel in kernels} <= set(files)
    # sm_89 runs sm_86's.
    assert sorted((kernel.function, kernel.architecture) for kernel in kernels) == [
        ("attend", 86), ("attend", 120), ("index_keys", 86), ("index_keys", 120),
    ]  # fmt: skip
    assert said == ["Preparing 4 GPU kernels for sm86, sm120"]


@pytest.mark.nightly
@needs_triton
def test_the_kernels_of_a_default_engine_keep_all_in_registers(nodes: list[KernelNode], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX, which says what it builds for, is not installed")
    architectures = EngineTarget(Backend.TENSORRT_RTX).architectures
    files = write_kernels(nodes, tmp_path, dtype="float16", architectures=architectures)
    kernels = [read_kernel(tmp_path / file) for file in files if file.endswith(".json")]
    assert {kernel.architecture for kernel in kernels} >= {80, 86, 120, 121}
    assert {kernel.spilled_bytes for kernel in kernels} == {0}


TIMED = Dense(dtype="float16", head_dim=64)
"""Dense attention whose kernel is known to be faster than ONNX Runtime's on a GPU."""

SHARED_NUMBERS = Clipped(reach=16)

AUTO, PLUGIN, NATIVE = (EngineOptions(attention_impl=impl) for impl in AttentionImpl)


@pytest.mark.parametrize(
    ("layer", "options", "architectures"),
    [
        (WINDOW, AUTO, [None]),
        (WINDOW, PLUGIN, [None]),
        (WINDOW, NATIVE, []),
        (TIMED, AUTO, [("sm90",)]),
        (TIMED, PLUGIN, [None]),
        (TIMED, NATIVE, []),
        (replace(TIMED, dtype="float32"), AUTO, []),
        (replace(TIMED, dtype="bfloat16"), AUTO, []),
        (replace(TIMED, dtype="float32"), PLUGIN, [None]),
        (replace(TIMED, head_dim=128), AUTO, []),
        (replace(TIMED, causal=1), AUTO, []),
        (replace(TIMED, head_dim=48), PLUGIN, []),
    ],
    ids=str,
)
def test_onnx_runtime_is_to_run_kernels_that_are_known_to_be_faster_or_that_were_asked_for(
    layer: Layer, options: EngineOptions, architectures: list[tuple[str, ...] | None]
) -> None:
    model = attention_model(layer, layer)
    found = options.chosen(kernel_records(model, dtype=layer.dtype))
    assert [node.architectures for node in found] == architectures


@pytest.mark.parametrize(
    ("layer", "options", "types"),
    [
        (SHARED_NUMBERS, AUTO, [f"ClippedDistanceAttention{LONG_SEQUENCES}"]),
        (SHARED_NUMBERS, PLUGIN, ["ClippedDistanceAttention", f"ClippedDistanceAttention{LONG_SEQUENCES}"]),
        (SHARED_NUMBERS, NATIVE, []),
        (replace(SHARED_NUMBERS, by_query=True), AUTO, ["ClippedDistanceAttention"]),
    ],
    ids=str,
)
def test_onnx_runtime_s_own_computes_short_texts_by_shared_numbers_unless_kernels_were_asked_for(
    layer: Layer, options: EngineOptions, types: list[str]
) -> None:
    found = options.chosen(kernel_records(attention_model(layer, layer), dtype=layer.dtype))
    assert [(node.op_type, node.architectures) for node in found] == [(name, None) for name in types]


def test_a_type_of_nodes_without_a_kernel_leaves_others_their_kernels() -> None:
    model = attention_model(WINDOW, replace(TIMED, head_dim=32))
    for node in operator_nodes(model, "DenseAttention"):
        node.attributes["scale"] = ir.AttrFloat32("scale", -1.0)
    assert [node.operator for node in kernel_records(model, dtype="float16")] == ["SlidingWindowAttention"]


@needs_triton
def test_kernels_are_compiled_for_the_gpus_that_are_to_run_them(tmp_path: Path) -> None:
    nodes = AUTO.chosen(kernel_records(attention_model(TIMED), dtype="float16"))
    assert write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",)) == ()
    files = write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86", "sm90"))
    assert {read_kernel(tmp_path / file).architecture for file in files if file.endswith(".json")} == {90}


@needs_triton
def test_a_plugin_finds_what_was_written_for_its_gpu(nodes: list[KernelNode], tmp_path: Path) -> None:
    write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",))
    shapes = [(1, 2, 1, 32)] * 3 + [(1, 1)]

    def found(dtype: str, architecture: int) -> set[str]:
        return set(
            find_kernels(
                tmp_path / "kernels", "SlidingWindowAttention-", PLUGIN_SPEC.kernels, architecture=architecture,
                serves=lambda kernel: PLUGIN_SPEC.serves(kernel, shapes, {}, dtype=dtype),
            )
        )  # fmt: skip

    assert found("float16", 86) == found("float16", 89) == set(PLUGIN_SPEC.kernels)
    for dtype, architecture in (("bfloat16", 86), ("float16", 80), ("float16", 120)):
        with pytest.raises(KernelError, match="Compile it for this GPU"):
            found(dtype, architecture)


def test_a_gpu_that_is_too_old_is_refused(nodes: list[KernelNode], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"8\.0 or newer, not sm_75\.\n.*architectures.*attention_impl='native'"):
        write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm75", "sm86"))
    assert list(tmp_path.iterdir()) == []


def test_without_triton_the_error_names_the_package_and_the_way_around(
    nodes: list[KernelNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match=r"pip install triton .*attention_impl='native'"):
        write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",))


@needs_triton
def test_a_kernel_that_does_not_compile_is_an_error_of_ours(
    nodes: list[KernelNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way of the cache")
    with pytest.raises(ExportError, match=r"cannot be kept in (.|\n)*attention_impl='native'"):
        write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",))
