"""Kernels of a bundle: compiled for the GPUs of its engines, and loaded by the plugins that need them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from hdexport.graph.targets.tensorrt.kernels import write_kernels
from hdexport.graph.targets.tensorrt.lowering import tensorrt_graph
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdexport.graph.targets.tensorrt.plugin_nodes import plugin_nodes
from hdplugins.attention.window.plugin import FACE
from hdplugins.kernels.aot import KernelError, read_kernel
from hdplugins.kernels.cuda_launch import find_kernels
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import ExportError, InputError, MissingDependencyError
from support.attention_graphs import attention_model
from support.operators.window import Window

WINDOW = Window(left=16, right=16, bound=4, dtype="float16")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def nodes() -> list[ir.Node]:
    return plugin_nodes(tensorrt_graph(attention_model(WINDOW, WINDOW, WINDOW), dtype="float16"))


@needs_triton
def test_a_bundle_gets_the_kernels_of_its_engines_each_once(nodes: list[ir.Node], tmp_path: Path) -> None:
    said: list[str] = []
    files = write_kernels(
        nodes, tmp_path, dtype="float16", architectures=("sm86", "sm89", "sm120"), progress=said.append
    )
    assert sorted(files) == sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    kernels = [read_kernel(tmp_path / file) for file in files if file.endswith(".json")]
    assert {kernel.cubin.relative_to(tmp_path).as_posix() for kernel in kernels} <= set(files)
    # sm_89 runs sm_86's.
    assert sorted((kernel.function, kernel.architecture) for kernel in kernels) == [
        ("attend", 86), ("attend", 120), ("plan_keys", 86), ("plan_keys", 120),
    ]  # fmt: skip
    assert said == ["Preparing 4 GPU kernels for sm86, sm120"]


@pytest.mark.nightly
@needs_triton
def test_the_kernels_of_a_default_engine_keep_all_in_registers(nodes: list[ir.Node], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX, which says what it builds for, is not installed")
    architectures = EngineTarget(Backend.TENSORRT_RTX).architectures
    files = write_kernels(nodes, tmp_path, dtype="float16", architectures=architectures)
    kernels = [read_kernel(tmp_path / file) for file in files if file.endswith(".json")]
    assert {kernel.architecture for kernel in kernels} >= {80, 86, 120, 121}
    assert {kernel.spilled_bytes for kernel in kernels} == {0}


@needs_triton
def test_a_plugin_finds_what_was_written_for_its_gpu(nodes: list[ir.Node], tmp_path: Path) -> None:
    write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",))
    shapes = [(1, 2, 1, 32)] * 3 + [(1, 1)]

    def found(dtype: str, architecture: int) -> set[str]:
        return set(
            find_kernels(
                tmp_path / "kernels", "SlidingWindowAttention-", FACE.kernels, architecture=architecture,
                serves=lambda kernel: FACE.serves(kernel, shapes, {}, dtype=dtype),
            )
        )  # fmt: skip

    assert found("float16", 86) == found("float16", 89) == set(FACE.kernels)
    for dtype, architecture in (("bfloat16", 86), ("float16", 80), ("float16", 120)):
        with pytest.raises(KernelError, match="Compile it for this GPU"):
            found(dtype, architecture)


def test_a_gpu_that_is_too_old_is_refused(nodes: list[ir.Node], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"8\.0 or newer, not sm_75\.\n.*--sm.*--attention-impl native"):
        write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm75", "sm86"))
    assert list(tmp_path.iterdir()) == []


def test_without_triton_the_error_names_the_package_and_the_way_around(
    nodes: list[ir.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match=r"pip install triton .*--attention-impl native"):
        write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",))


@needs_triton
def test_a_kernel_that_does_not_compile_is_an_error_of_ours(
    nodes: list[ir.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way of the cache")
    with pytest.raises(ExportError, match=r"cannot be kept in (.|\n)*--attention-impl native"):
        write_kernels(nodes, tmp_path, dtype="float16", architectures=("sm86",))
