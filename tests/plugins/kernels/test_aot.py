"""Kernels compiled ahead of time: what makes another kernel, what the cache keeps, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hdplugins.kernels.aot import (
    CompiledKernel,
    KernelError,
    KernelSource,
    cache_directory,
    compile_kernels,
    read_kernel,
)
from support.no_compilers import without_compilers

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double(source, target, count, block: tl.constexpr):
    lane = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + lane, tl.load(source + lane, mask=lane < count) * FACTOR, mask=lane < count)
"""


CALLED = """
import triton

@triton.jit
def times():
    return FACTOR
"""

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "architecture": {"architecture": 90},
    "constants": {"constants": {"block": 256}},
    "num_warps": {"num_warps": 8},
    "aligned": {"aligned": ()},
    "signature": {"signature": {"source": "*fp16", "target": "*fp16", "count": "i32"}},
}
"""What may differ between kernels of another operator."""


@pytest.fixture
def kernel_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel of another operator, in a module that only this process's path finds."""
    folder = tmp_path / "operators"
    folder.mkdir()
    file = folder / "another_operator.py"
    file.write_text(KERNEL.replace("FACTOR", "2"))
    monkeypatch.syspath_prepend(str(folder))
    yield file
    sys.modules.pop("another_operator", None)


def another(**changes: object) -> KernelSource:
    source = KernelSource(
        module="another_operator",
        function="double",
        architecture=80,
        signature={"source": "*fp32", "target": "*fp32", "count": "i32"},
        constants={"block": 512},
        aligned=("source", "target"),
    )
    return dataclasses.replace(source, **changes)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the variants of the other operator's kernel."""
    folder = tmp_path_factory.mktemp("once")
    (folder / "another_operator.py").write_text(KERNEL.replace("FACTOR", "2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        sources = [another(**changes) for changes in VARIANTS.values()]
        compile_kernels([*sources, *sources], cache=folder / "cache", processes=1)
    return folder / "cache"


@pytest.fixture
def warm_cache(compiled_once: Path, kernel_module: Path, tmp_path: Path) -> Path:
    """A copy of it, for the kernel as it is in `kernel_module`."""
    return Path(shutil.copytree(compiled_once, tmp_path / "cache"))


def entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir())


def test_another_operator_needs_only_its_kernel_signature_and_constants(
    warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compilers(monkeypatch)
    kernel, again = compile_kernels([another(), another()], cache=warm_cache)
    assert (kernel.name, kernel.architecture, kernel.num_warps, kernel.constants) == ("double", 80, 4, {"block": 512})
    assert kernel.arguments == (("source", "*fp32"), ("target", "*fp32"), ("count", "i32"))
    assert kernel.cubin.read_bytes()[:4] == b"\x7fELF"
    assert read_kernel(kernel.metadata) == kernel == again


def test_whatever_the_machine_code_depends_on_makes_another_kernel_and_nothing_is_compiled_again(
    warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compilers(monkeypatch)
    kernels = compile_kernels([another(**changes) for changes in VARIANTS.values()], cache=warm_cache)
    assert len({kernel.sha256 for kernel in kernels}) == len(entries(warm_cache)) == len(VARIANTS)
    with pytest.raises(AssertionError, match="a compiler was started"):
        compile_kernels([another(constants={"block": 1024})], cache=warm_cache)


def test_a_changed_source_is_compiled_again_as_is_a_function_of_another_module(
    kernel_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And variables of Triton do not reach the compiler."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    called = kernel_module.with_name("called_module.py")
    called.write_text(CALLED.replace("FACTOR", "2"))
    kernel_module.write_text("from called_module import times\n" + KERNEL.replace("* FACTOR", "* times()"))
    source = another(called_modules=("called_module",))
    (old,) = compile_kernels([source], cache=tmp_path / "cache")
    assert old.cubin.exists()
    assert not (tmp_path / "triton").exists()
    without_compilers(monkeypatch)
    assert compile_kernels([source], cache=tmp_path / "cache") == (old,)
    for changed, text in ((called, CALLED.replace("FACTOR", "3")), (kernel_module, KERNEL.replace("FACTOR", "4"))):
        before = changed.read_text()
        changed.write_text(text)
        with pytest.raises(AssertionError, match="a compiler was started"):
            compile_kernels([source], cache=tmp_path / "cache")
        changed.write_text(before)
        assert compile_kernels([source], cache=tmp_path / "cache") == (old,)


def test_damaged_entries_are_compiled_again(warm_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    sources = [another(**changes) for changes in VARIANTS.values()]
    kernels = compile_kernels(sources, cache=warm_cache)
    codes = [kernel.cubin.read_bytes() for kernel in kernels]
    changed, short, no_cubin, no_json, no_field, not_json = kernels
    changed.cubin.write_bytes(codes[0][:-1] + bytes([codes[0][-1] ^ 1]))
    short.cubin.write_bytes(codes[1][:100])
    no_cubin.cubin.unlink()
    no_json.metadata.unlink()
    described = json.loads(no_field.metadata.read_text())
    del described["name"]
    no_field.metadata.write_text(json.dumps(described))
    not_json.metadata.write_text("{")
    for kernel in kernels:
        with pytest.raises(KernelError, match="Compile it again"):
            read_kernel(kernel.metadata)
    assert compile_kernels(sources, cache=warm_cache, processes=1) == kernels
    assert caplog.text.count("Compile it again") == len(kernels)
    assert [kernel.cubin.read_bytes() for kernel in kernels] == codes


def test_what_cannot_be_compiled_is_refused_and_what_was_compiled_before_is_kept(
    kernel_module: Path, warm_cache: Path
) -> None:
    cache = warm_cache
    for changes, message in (
        ({"signature": {"target": "*fp32", "source": "*fp32", "count": "i32"}}, "double takes"),
        ({"module": "no_such_operator"}, "There is no module no_such_operator"),
        ({"function": "triple"}, "triple"),
    ):
        with pytest.raises(KernelError, match=message):
            compile_kernels([another(), another(**changes)], cache=cache)
    kernel_module.write_text(KERNEL.replace("FACTOR", "undefined_name"))
    with pytest.raises(
        KernelError, match=r"another_operator\.double for sm_80 could not be compiled(.|\n)*undefined_name"
    ):
        compile_kernels([another()], cache=cache)
    assert len(entries(cache)) == len(VARIANTS)


def test_a_cache_that_cannot_be_written_is_an_error(kernel_module: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match=r"cannot be kept in .*file/cache(.|\n)*Set XDG_CACHE_HOME"):
        compile_kernels([another()], cache=tmp_path / "file" / "cache")


def test_compilers_that_race_for_one_kernel_agree(kernel_module: Path, tmp_path: Path) -> None:
    results: list[tuple[CompiledKernel, ...]] = []
    threads = [
        threading.Thread(target=lambda: results.append(compile_kernels([another()], cache=tmp_path / "cache")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(entries(tmp_path / "cache")) == 1


def test_without_triton_the_error_says_how_to_install_it(
    kernel_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(KernelError, match=r"not installed\.\nInstall it with: pip install triton"):
        compile_kernels([another()], cache=tmp_path / "cache")


def test_without_the_assembler_the_error_says_where_it_comes_from(
    kernel_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Imported by the compiler's Python before anything else: a Triton whose assembler was removed.
    (kernel_module.parent / "sitecustomize.py").write_text(
        "import triton.knobs\ntriton.knobs.NvidiaTool.from_path = staticmethod(lambda path: None)\n"
    )
    with pytest.raises(KernelError, match=r"assembler for sm_80 is missing (.|\n)*--force-reinstall triton"):
        compile_kernels([another()], cache=tmp_path / "cache")


def test_a_compiled_kernel_is_read_without_triton_or_torch(warm_cache: Path) -> None:
    (kernel,) = compile_kernels([another()], cache=warm_cache)
    program = (
        "import sys; sys.modules.update(triton=None, torch=None); from pathlib import Path\n"
        "from hdplugins.kernels.aot import read_kernel\n"
        "from hdplugins.attention.window.plugin import PLUGIN_SPEC\n"
        f"print(read_kernel(Path({str(kernel.metadata)!r})).sha256)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kernel.sha256


def test_kernels_are_kept_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/user"))
    for platform, folder, expected in (
        ("linux", "/elsewhere", "/elsewhere/hdexport/kernels"),
        ("linux", "", "/home/user/.cache/hdexport/kernels"),
        ("darwin", "", "/home/user/Library/Caches/hdexport/kernels"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert cache_directory() == Path(expected)
