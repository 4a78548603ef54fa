"""Our kernels as machine code: arguments, registers, shared memory, and which there are.

Every run compiles each operator for an architecture, and together for all; the whole grid is nightly, with the oldest
and the newest Triton beside the installed one where `make test-all` has put them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.attention.window.plugin import WINDOW_HEAD_DIMS
from hdplugins.kernels import aot
from hdplugins.kernels.aot import (
    CompiledKernel,
    KernelSource,
    compile_kernels,
    read_kernel,
)
from hdplugins.kernels.aot_worker import register_limits
from hdplugins.kernels.block_config import HEAD_DIMS
from support.comparators import named_case
from support.described_operators import WITH_KERNELS
from support.no_compilers import without_compilers

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Architecture -> dynamic shared memory of one program at most (CUDA C++ Programming Guide, compute capabilities)."""

TENSOR_CORES = dict.fromkeys((80, 86, 120), "mma.sync") | {90: "wgmma.mma_async", 100: "tcgen05.mma"}

WINDOWS, BLOCKS, CHUNKS, LSH = "SlidingWindowAttention", "BlockSparseAttention", "ChunkAttention", "LSHAttention"

RELATIVE, CLIPPED = "RelativeAttention", "ClippedDistanceAttention"

DENSE = "DenseAttention"

EVERY = (WINDOWS, BLOCKS, CHUNKS, LSH, RELATIVE, CLIPPED, DENSE)


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
    return plugin_spec_of(operator).kernel_sources(shapes, attributes, dtype=dtype, architectures=architectures)


ALL_SOURCES = [source for name in EVERY for source in sources_of(name, head_dim=80)]


TRITONS = [None, *sorted(Path(sys.prefix, "tritons").glob("*"))]
"""Folders of other versions; None is the installed one."""


@pytest.fixture(params=TRITONS, ids=lambda folder: folder.name if folder else "installed")
def any_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers import that version: `aot` passes them this process's paths."""
    if request.param is not None:
        monkeypatch.syspath_prepend(str(request.param))


@dataclass(frozen=True)
class Case:
    """An operator's kernels for a GPU."""

    operator: str
    architecture: int
    dtype: str = "float16"
    head_dim: int = 64
    size: int = 64

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        given = {"head_dim": self.head_dim, "dtype": self.dtype, "architectures": [self.architecture]}
        return sources_of(self.operator, self.size, **given)


EVERY_RUN = (
    # Those of engines in test_rebuild.py and test_sparse_engine.py.
    Case(WINDOWS, 120, head_dim=32),
    Case(LSH, 120, head_dim=32),
    Case(BLOCKS, 90, "bfloat16", size=84),
    Case(CHUNKS, 100),
    Case(RELATIVE, 86, head_dim=32),
    Case(CLIPPED, 80, "float32"),
    Case(DENSE, 90),
)
"""Every operator, architecture and dtype."""

DTYPES = ("float16", "bfloat16", "float32")

SIZES = {
    WINDOWS: [("float16", 64, 64), ("float32", 64, 64), ("bfloat16", 128, 64), *((dtype, 256, 64) for dtype in DTYPES)],
    BLOCKS: [("float16", 64, 64), ("float32", 64, 64), ("bfloat16", 128, 64), ("float16", 64, 84)],
    **dict.fromkeys((CHUNKS, LSH), tuple(itertools.product(DTYPES, HEAD_DIMS, (16, 32, 64)))),
    **dict.fromkeys((RELATIVE, CLIPPED), tuple(itertools.product(DTYPES, HEAD_DIMS, (64,)))),
    DENSE: tuple(itertools.product(DTYPES, WINDOW_HEAD_DIMS, (64,))),
}
"""Operator -> types, sizes of heads, and sizes of blocks or chunks, of its kernels that a nightly run compiles."""


def called_modules(kernel: Any) -> set[str]:
    """The modules of a Triton function and of all that it calls."""
    named = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    called = [value for value in named if isinstance(value, triton.JITFunction)]
    return {kernel.fn.__module__}.union(*map(called_modules, called))


def assert_worth_shipping(kernel: CompiledKernel) -> None:
    assert kernel.spilled_bytes == 0, f"{kernel.cubin.stem}: {kernel.spilled_bytes} bytes spilled"
    assert not kernel.warnings, f"{kernel.cubin.stem}: the assembler warns of {', '.join(kernel.warnings)}"


def wide_loads(ptx: str) -> tuple[int, int]:
    """(loads to registers, copies to shared memory) of 16 bytes a thread."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], *(?:0x10|16)\b", ptx)
    return len(re.findall(r"ld\.global\S*\.v4\.[bu]32", ptx)), len(copies)


def narrow_loads(ptx: str) -> int:
    return len(re.findall(r"ld\.global\S*\.[bu](?:8|16)\b", ptx))


@pytest.fixture(scope="module")
def compiled() -> Mapping[Case, Sequence[CompiledKernel]]:
    """The kernels of every run, from the user's cache, as for all kernels that are ours."""
    kernels = iter(compile_kernels([source for case in EVERY_RUN for source in case.sources]))
    return {case: list(itertools.islice(kernels, len(case.sources))) for case in EVERY_RUN}


@pytest.fixture(scope="module")
def attends(compiled: Mapping[Case, Sequence[CompiledKernel]]) -> list[CompiledKernel]:
    """`attend` of every operator."""
    return [kernel for kernels in compiled.values() for kernel in kernels if kernel.function == "attend"]


@pytest.fixture(scope="module")
def compiled_apart(tmp_path_factory: pytest.TempPathFactory) -> Sequence[CompiledKernel]:
    """Four kernels that are always compiled, by compilers that cannot import PyTorch, which takes most of the time.

    They are `attend` of chunks without alignment and with more queries than a warp has registers for, and `list_blocks`
    with a table and without.
    """
    folder = tmp_path_factory.mktemp("apart")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    (source,) = sources_of(CHUNKS, 16)
    unaligned = dataclasses.replace(source, aligned=())
    crowded = dataclasses.replace(source, num_warps=1, constants={**source.constants, "BLOCK_M": 64})
    both = (sources_of(BLOCKS, optional=optional) for optional in (True, False))
    lists = [source for sources in both for source in sources if source.function == "list_blocks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return compile_kernels([unaligned, crowded, *lists], cache=folder / "cache", processes=1)


def test_every_run_compiles_each_operator_and_for_each_architecture_and_dtype() -> None:
    assert {case.operator for case in EVERY_RUN} == set(EVERY) == WITH_KERNELS
    assert {case.architecture for case in EVERY_RUN} == set(SHARED_BYTES)
    assert {case.dtype for case in EVERY_RUN} == {*DTYPES}


def test_a_launch_finds_its_arguments_in_the_order_of_the_machine_code(attends: Sequence[CompiledKernel]) -> None:
    for attend in attends:
        declared = re.search(r"\.entry (\w+)\(([^)]*)\)", attend.ptx.read_text())
        assert declared is not None
        types = re.findall(r"\.param \.(u64|u32|f32|s32|b64|b32)", declared[2])
        width = {"*": "64", "i": "32", "f": "32"}
        with named_case(attend.cubin.stem):
            assert declared[1] == attend.name
            assert [kind[1:] for kind in types] == [
                *(width[kind[0]] for _, kind in attend.arguments),
                *["64"] * attend.scratch_pointers,
            ]
            assert attend.arguments[0][0].startswith("query")
            assert attend.arguments[-1] == ("scale", "fp32")


def test_kernels_name_no_path_of_the_machine_that_compiled_them(attends: Sequence[CompiledKernel]) -> None:
    for attend in attends:
        for file in (attend.cubin, attend.ptx, attend.metadata):
            assert b"kernel.py" not in file.read_bytes(), file.name
            assert os.fsencode(Path(aot.__file__).parent) not in file.read_bytes(), file.name


def test_a_pointer_that_a_kernel_does_without_is_not_an_argument(compiled_apart: Sequence[CompiledKernel]) -> None:
    *_, with_table, without = compiled_apart
    assert [with_table.arguments[0][0], without.arguments[0][0]] == ["listed_blocks", "block_index"]
    assert with_table.arguments[1:] == without.arguments
    assert read_kernel(without.metadata).constants["listed_blocks"] is None


def assert_is_good_machine_code(case: Case, kernels: Sequence[CompiledKernel]) -> None:
    """Loads are 16 bytes wide, products run on tensor cores, and no register is spilled."""
    assert {kernel.architecture for kernel in kernels} == {case.architecture}
    for kernel in kernels:
        assert_worth_shipping(kernel)
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.architecture]
        if kernel.function == "attend":
            assert 0 < kernel.registers <= 255
            assert kernel.shared_bytes > 0
            ptx = kernel.ptx.read_text()
            loads, copies = wide_loads(ptx)
            assert loads > 0
            # Triton pipelines no loop around another: that over a head's columns, where a product takes some of them.
            assert (copies > 0) == (kernel.constants.get("columns", case.head_dim) == case.head_dim)
            # A query has one score of other segments; a truth is a byte.
            is_narrow = case.dtype != "float32" and "segment_scores" in dict(kernel.arguments)
            assert (narrow_loads(ptx) > 0) == (is_narrow or case.operator in (CLIPPED, DENSE))
            # So many queries as the newer instructions take do not fit the registers beside sums by distance.
            is_older = case.operator == RELATIVE and case.architecture == 90
            cores = TENSOR_CORES[80 if is_older else kernel.architecture]
            assert (cores in ptx) == (case.dtype != "float32")


@pytest.mark.parametrize("case", EVERY_RUN, ids=str)
def test_kernels_copy_wide_keep_all_in_registers_and_fit_the_shared_memory(
    case: Case, compiled: Mapping[Case, Sequence[CompiledKernel]]
) -> None:
    assert_is_good_machine_code(case, compiled[case])


@pytest.mark.nightly
@pytest.mark.usefixtures("any_triton")
@pytest.mark.parametrize("operator", EVERY)
def test_kernels_of_every_size_keep_all_in_registers_and_fit_the_shared_memory(operator: str) -> None:
    """Each is machine code of its own, with and without what is optional."""
    sources = [
        source
        for dtype, head_dim, size in SIZES[operator]
        for optional in ((True, False) if operator in (RELATIVE, CLIPPED) else (True,))
        for source in sources_of(
            operator, size, head_dim=head_dim, dtype=dtype, architectures=list(SHARED_BYTES), optional=optional
        )
    ]
    for kernel in compile_kernels(sources):
        assert_worth_shipping(kernel)
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.architecture]


def test_what_was_compiled_is_in_the_users_cache(
    compiled: Mapping[Case, Sequence[CompiledKernel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compilers(monkeypatch)
    for case, kernels in compiled.items():
        assert list(compile_kernels(case.sources)) == kernels
        assert all(aot.cache_directory() in kernel.cubin.parents for kernel in kernels)


@pytest.mark.nightly
@pytest.mark.usefixtures("any_triton")
@pytest.mark.parametrize("head_dim", WINDOW_HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_windows_of_every_head_keep_all_in_registers(dtype: str, head_dim: int) -> None:
    spec, shapes = plugin_spec_of(OPERATORS[WINDOWS]), [*[(1, 1, 1, head_dim)] * 3, (1, 1)]
    sources = [
        source
        for architecture in SHARED_BYTES
        for source in spec.kernel_sources(shapes, {}, dtype=dtype, architectures=[architecture])
    ]
    for kernel in compile_kernels(sources):
        assert_worth_shipping(kernel)
        assert kernel.shared_bytes <= SHARED_BYTES[kernel.architecture]


def test_three_programs_of_windows_share_a_processor_on_hopper() -> None:
    """Tiles that were timed so: see `docs/gpu.md`."""
    spec = plugin_spec_of(OPERATORS[WINDOWS])
    for head_dim in (64, 128):
        shapes = [*[(1, 1, 1, head_dim)] * 3, (1, 1)]
        source = spec.kernel_sources(shapes, {}, dtype="float16", architectures=[90])[-1]
        assert (source.function, source.maxnreg) == ("attend", 2**16 // (3 * 32 * source.num_warps) // 8 * 8)
        (kernel,) = compile_kernels([source])
        assert kernel.registers <= 168
        assert 3 * kernel.shared_bytes <= SHARED_BYTES[90]
    assert spec.kernel_sources(shapes, {}, dtype="float32", architectures=[90])[-1].maxnreg is None


def test_the_oldest_triton_of_the_whole_grid_is_the_oldest_that_is_installed() -> None:
    root = Path(__file__).parents[3]
    tried = re.search(r"^TRITONS := .*Linux,.*\),([\d.]+) ([\d.]+)\)$", (root / "Makefile").read_text(), re.MULTILINE)
    allowed = re.search(r'"triton>=([\d.]+),<4', (root / "pyproject.toml").read_text())
    assert tried is not None
    assert allowed is not None
    assert tried[1] == f"{allowed[1]}.0"


def test_a_limit_of_registers_that_would_spill_is_not_kept() -> None:
    spec, shapes = plugin_spec_of(OPERATORS[WINDOWS]), [*[(1, 1, 1, 64)] * 3, (1, 1)]
    source = spec.kernel_sources(shapes, {}, dtype="float16", architectures=[90])[-1]
    (kernel,) = compile_kernels([replace(source, maxnreg=128)])
    assert (kernel.spilled_bytes, kernel.registers > 128) == (0, True)


@pytest.mark.parametrize(
    ("registers", "num_warps", "limits"),
    [
        (80, 8, [128, 255]),  # three blocks of a processor become two, and one
        (96, 2, [112, 128, 144, 168, 200, 255]),
        (168, 4, [255]),
        (255, 8, []),
    ],
)
def test_a_kernel_that_spills_gets_the_registers_of_a_block_less_and_no_more_than_there_are(
    registers: int, num_warps: int, limits: list[int]
) -> None:
    assert register_limits(registers, num_warps) == limits


def test_the_checks_of_machine_code_see_what_they_are_for(compiled_apart: Sequence[CompiledKernel]) -> None:
    """Without alignment loads are narrow, and too many queries do not fit the registers."""
    unaligned, crowded, *_ = compiled_apart
    ptx = unaligned.ptx.read_text()
    assert wide_loads(ptx) == (0, 0)
    assert narrow_loads(ptx) > 0
    with pytest.raises(AssertionError, match="bytes spilled"):
        assert_worth_shipping(crowded)


@pytest.mark.nightly
def test_a_warning_of_the_assembler_is_seen() -> None:
    """Relative attention with more queries than sm_90 has registers for."""
    (source,) = sources_of(RELATIVE, architectures=[90])
    (waiting,) = compile_kernels([dataclasses.replace(source, constants={**source.constants, "BLOCK_M": 64})])
    with pytest.raises(AssertionError, match="the assembler warns of C7511"):
        assert_worth_shipping(waiting)


def test_our_kernels_name_every_module_whose_functions_they_call() -> None:
    for source in ALL_SOURCES:
        kernel = getattr(importlib.import_module(source.module), source.function)
        assert called_modules(kernel) <= {source.module, *source.called_modules}, source


def test_every_head_dim_has_a_kernel_for_every_architecture_and_dtype() -> None:
    sizes = [(RELATIVE, 0), *itertools.product((BLOCKS, CHUNKS, LSH), (1, 16, 32, 64, 84, 128))]
    for head_dim, dtype in itertools.product(WINDOW_HEAD_DIMS, DTYPES):
        for operator, size in [(WINDOWS, 0), (DENSE, 0), *(sizes if head_dim in HEAD_DIMS else [])]:
            sources = sources_of(operator, size, head_dim=head_dim, dtype=dtype, architectures=list(SHARED_BYTES))
            case = (operator, size, head_dim, dtype)
            assert [source.architecture for source in sources if source.function == "attend"] == [*SHARED_BYTES], case
            assert len(sources) == len(SHARED_BYTES) * len(plugin_spec_of(OPERATORS[operator]).kernels), case
