"""Our kernels as machine code: arguments, registers, shared memory, and which there are."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hdplugins import OPERATORS
from hdplugins.kernels import aot
from hdplugins.kernels.aot import (
    CompiledKernel,
    KernelSource,
    compile_kernels,
    read_kernel,
)
from hdplugins.kernels.attention_tiles import HEAD_DIMS
from hdplugins.operators.plugin_face import face_of
from hdplugins.operators.sliding_window_attention.tiles import WINDOW_HEAD_DIMS
from support.no_compilers import without_compilers

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Architecture -> dynamic shared memory of one program at most (CUDA C++ Programming Guide, compute capabilities)."""

TENSOR_CORES = dict.fromkeys((80, 86, 120), "mma.sync") | {90: "wgmma.mma_async", 100: "tcgen05.mma"}

WINDOWS, BLOCKS, CHUNKS, LSH = "SlidingWindowAttention", "BlockSparseAttention", "ChunkAttention", "LSHAttention"

RELATIVE, CLIPPED = "RelativeAttention", "ClippedDistanceAttention"

EVERY = (WINDOWS, BLOCKS, CHUNKS, LSH, RELATIVE, CLIPPED)


def sources_of(
    name: str,
    size: int = 64,
    *,
    head_dim: int = 64,
    dtype: str = "float16",
    architectures: Sequence[int] = (80,),
    optional: bool = True,
) -> tuple[KernelSource, ...]:
    """Of an operator, with all that it takes or without what is optional; blocks or chunks are of that many tokens."""
    operator, state = OPERATORS[name], (1, 1, 1, head_dim)
    last = [(1, 1, 1)] if optional else []
    others = {
        BLOCKS: last,
        LSH: [(1, head_dim, 1, 1)],
        RELATIVE: [(1, 1, head_dim), (1, head_dim), (1, head_dim), *last],
        CLIPPED: [(1, 1, 1, 3), *[(3, head_dim)] * optional],
    }.get(name, [])
    shapes = [*[state] * operator.states, (1, 1), *others]
    attributes = {"block_size": size, "chunk": size}
    return face_of(operator).kernel_sources(shapes, attributes, dtype=dtype, architectures=architectures)


ALL_SOURCES = [source for name in EVERY for source in sources_of(name, head_dim=80)]


def called_modules(kernel: Any) -> set[str]:
    """The modules of a Triton function and of all that it calls."""
    named = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    called = [value for value in named if isinstance(value, triton.JITFunction)]
    return {kernel.fn.__module__}.union(*map(called_modules, called))


def assert_no_spills(kernel: CompiledKernel) -> None:
    assert kernel.spilled_bytes == 0, f"{kernel.cubin.stem}: {kernel.spilled_bytes} bytes spilled"


def wide_loads(ptx: str) -> tuple[int, int]:
    """(loads to registers, copies to shared memory) of 16 bytes a thread."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], *(?:0x10|16)\b", ptx)
    return len(re.findall(r"ld\.global\S*\.v4\.[bu]32", ptx)), len(copies)


def narrow_loads(ptx: str) -> int:
    return len(re.findall(r"ld\.global\S*\.[bu](?:8|16)\b", ptx))


@pytest.fixture(scope="module", params=EVERY)
def attend(request: pytest.FixtureRequest) -> CompiledKernel:
    """`attend` for sm_80, from the user's cache, as for all kernels that are ours."""
    (kernel,) = compile_kernels([source for source in sources_of(request.param) if source.function == "attend"])
    return kernel


def test_a_launch_finds_its_arguments_in_the_order_of_the_machine_code(attend: CompiledKernel) -> None:
    declared = re.search(r"\.entry (\w+)\(([^)]*)\)", attend.ptx.read_text())
    assert declared is not None
    types = re.findall(r"\.param \.(u64|u32|f32|s32|b64|b32)", declared[2])
    width = {"*": "64", "i": "32", "f": "32"}
    assert declared[1] == attend.name
    assert [kind[1:] for kind in types] == [
        *(width[kind[0]] for _, kind in attend.arguments),
        *["64"] * attend.scratch_pointers,
    ]
    assert attend.arguments[0][0].startswith("query")
    assert attend.arguments[-1] == ("scale", "fp32")


def test_kernels_name_no_path_of_the_machine_that_compiled_them(attend: CompiledKernel) -> None:
    for file in (attend.cubin, attend.ptx, attend.metadata):
        assert b"triton_kernel.py" not in file.read_bytes()
        assert os.fsencode(Path(aot.__file__).parent) not in file.read_bytes()


def test_a_pointer_that_a_kernel_does_without_is_not_an_argument(tmp_path: Path) -> None:
    both = (sources_of(BLOCKS, optional=optional) for optional in (True, False))
    with_and_without = [source for sources in both for source in sources if source.function == "list_blocks"]
    compiled = compile_kernels(with_and_without, cache=tmp_path)
    assert [kernel.arguments[0][0] for kernel in compiled] == ["listed_blocks", "plan"]
    assert compiled[0].arguments[1:] == compiled[1].arguments
    assert read_kernel(compiled[1].metadata).constants["listed_blocks"] is None


@pytest.mark.parametrize(
    ("architectures", "dtype", "head_dim", "operator", "size"),
    [
        # Windows and blocks for each architecture but 100, and each dtype; other pairs are among the nightly cases.
        ([80, 90, 120], "float16", 64, WINDOWS, 64), ([86], "bfloat16", 128, WINDOWS, 64),
        ([80, 90, 120], "float16", 64, BLOCKS, 64), ([90], "float32", 64, BLOCKS, 64),
        ([86], "float16", 64, BLOCKS, 84), ([80, 120], "float16", 64, CHUNKS, 64),
        ([80, 120], "float16", 64, LSH, 64), ([86], "float32", 128, LSH, 32),
        ([80, 90, 120], "float16", 64, RELATIVE, 0), ([86], "float32", 64, RELATIVE, 0),
        ([80, 120], "float16", 64, CLIPPED, 0), ([90], "float16", 256, WINDOWS, 64),
        *(
            pytest.param(list(SHARED_BYTES), *case, 64, marks=pytest.mark.nightly)
            for case in itertools.product(("float16", "float32"), (64,), EVERY)
        ),
        *(
            pytest.param(list(SHARED_BYTES), *case, marks=pytest.mark.nightly)
            for case in (
                ("bfloat16", 128, WINDOWS, 64), ("bfloat16", 128, BLOCKS, 64), ("float16", 64, BLOCKS, 84),
                ("bfloat16", 128, CHUNKS, 64), ("bfloat16", 128, LSH, 64), ("float16", 256, WINDOWS, 64),
                ("bfloat16", 256, WINDOWS, 64), ("float32", 256, WINDOWS, 64),
            )
        ),
    ],
)  # fmt: skip
def test_kernels_copy_wide_keep_all_in_registers_and_fit_the_shared_memory(
    architectures: list[int], dtype: str, head_dim: int, operator: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads are 16 bytes wide, products run on tensor cores, and what was compiled is in the user's cache."""
    sources = sources_of(operator, size, head_dim=head_dim, dtype=dtype, architectures=architectures)
    compiled = compile_kernels(sources)
    assert {kernel.architecture for kernel in compiled} == set(architectures)
    for kernel in compiled:
        assert_no_spills(kernel)
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.architecture]
        if kernel.function == "attend":
            assert 0 < kernel.registers <= 255
            assert kernel.shared_bytes > 0
            ptx = kernel.ptx.read_text()
            loads, copies = wide_loads(ptx)
            assert loads > 0
            # Triton pipelines no loop around another: that over a head's columns, where a product takes some of them.
            assert (copies > 0) == (kernel.constants.get("columns", head_dim) == head_dim)
            # A query has one score of other segments; a truth is a byte.
            is_narrow = dtype != "float32" and "segment_scores" in dict(kernel.arguments)
            assert (narrow_loads(ptx) > 0) == (is_narrow or operator == CLIPPED)
            assert (TENSOR_CORES[kernel.architecture] in ptx) == (dtype != "float32")
    without_compilers(monkeypatch)
    assert compile_kernels(sources) == compiled


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("operator", [RELATIVE, CLIPPED])
def test_distances_keep_all_in_registers_with_and_without_what_is_optional(
    operator: str, head_dim: int, dtype: str
) -> None:
    """Segments, or values by distance."""
    sources = [
        source
        for optional in (True, False)
        for source in sources_of(
            operator, head_dim=head_dim, dtype=dtype, architectures=list(SHARED_BYTES), optional=optional
        )
    ]
    for kernel in compile_kernels(sources):
        assert_no_spills(kernel)
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.architecture]
        if operator == RELATIVE:
            assert kernel.constants["block_queries"] <= kernel.constants["block_keys"]


@pytest.mark.nightly
@pytest.mark.parametrize("operator", [CHUNKS, LSH])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_chunks_of_every_size_keep_all_in_registers(dtype: str, head_dim: int, operator: str) -> None:
    architectures = list(SHARED_BYTES)
    sizes = [
        sources_of(operator, size, head_dim=head_dim, dtype=dtype, architectures=architectures) for size in (16, 32, 64)
    ]
    for kernel in compile_kernels([source for sources in sizes for source in sources]):
        assert_no_spills(kernel)
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.architecture]


def test_the_checks_of_machine_code_see_what_they_are_for(tmp_path: Path) -> None:
    """Without alignment loads are narrow, and twice the queries a warp do not fit its registers."""
    (source,) = (source for source in sources_of(WINDOWS) if source.function == "attend")
    unaligned = dataclasses.replace(source, aligned=())
    crowded = dataclasses.replace(source, constants={**source.constants, "block_queries": 256})
    compiled = compile_kernels([unaligned, crowded], cache=tmp_path)
    ptx = compiled[0].ptx.read_text()
    assert wide_loads(ptx) == (0, 0)
    assert narrow_loads(ptx) > 0
    with pytest.raises(AssertionError, match="bytes spilled"):
        assert_no_spills(compiled[1])


@pytest.mark.parametrize("source", ALL_SOURCES, ids=lambda source: f"{source.module.split('.')[2]}.{source.function}")
def test_our_kernels_name_every_module_whose_functions_they_call(source: KernelSource) -> None:
    kernel = getattr(importlib.import_module(source.module), source.function)
    assert called_modules(kernel) <= {source.module, *source.called_modules}


def test_the_search_for_called_modules_sees_those_of_functions_that_are_called() -> None:
    attend = importlib.import_module("hdplugins.operators.block_sparse_attention.triton_kernel").attend
    assert called_modules(attend) > called_modules(
        importlib.import_module("hdplugins.kernels.running_softmax").load_rows
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", WINDOW_HEAD_DIMS)
def test_every_head_dim_has_a_kernel_for_every_architecture_and_dtype(head_dim: int, dtype: str) -> None:
    others = [(RELATIVE, 0), *itertools.product((BLOCKS, CHUNKS, LSH), (1, 16, 32, 64, 84, 128))]
    for operator, size in [(WINDOWS, 0), *(others if head_dim in HEAD_DIMS else [])]:
        sources = sources_of(operator, size, head_dim=head_dim, dtype=dtype, architectures=list(SHARED_BYTES))
        assert [source.architecture for source in sources if source.function == "attend"] == list(SHARED_BYTES)
        assert len(sources) == len(SHARED_BYTES) * len(face_of(OPERATORS[operator]).kernels)


def test_compilers_do_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would take most of their time."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    needed = [source for source in ALL_SOURCES if source.function in ("plan_keys", "count_tokens", "scan")]
    assert len(compile_kernels(needed, cache=tmp_path / "cache", processes=1)) == 3
