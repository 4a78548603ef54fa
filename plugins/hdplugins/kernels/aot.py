"""Triton kernels compiled ahead of time, for GPUs that need not be here: in parallel, and once for each source.

A `KernelSource` says what to compile: the kernel function, its argument types, its constants and its warps.
`compile_kernels` writes a cubin, its PTX and a JSON file with what a launch must know to the user's cache directory. A
bundle has copies of the first and the last; `read_kernel` reads them and needs neither Triton nor PyTorch.

Compilers run in separate processes: they use every core, get no variable of Triton's from this process, and leave
nothing in Triton's own cache.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

_WORKER = "hdplugins.kernels.aot_worker"
_LOG_LINES = 20
"""Lines of a failed compiler's output that an error quotes."""

Constant: TypeAlias = int | float | bool | str | None
"""Value of a constant of a kernel."""


class KernelError(RuntimeError):
    """A kernel could not be compiled, or its files cannot be used."""


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """One kernel for one kind of GPU.

    Attributes:
        module: import path of the kernel's module. What decides the machine code lies in this file or those of
            `called_modules`, or comes as a constant: the cache looks at no other file.
        function: name of the `triton.jit` function.
        architecture: compute capability as in sm_90: 90.
        signature: Triton's type of each argument that is not a constant, in the function's order: "*fp16", "i32".
            Names "strides.batch" and "strides.head" are the elements of the tuple argument `strides`.
        constants: the `tl.constexpr` arguments; None for a pointer that this kernel does not use.
        called_modules: import paths of the modules whose functions the kernel calls beside its own.
        aligned: arguments that are divisible by 16, pointers in bytes: without it no load is wider than one value.
        num_warps: warps of one CTA.
        num_stages: depth of the software pipeline.
        maxnreg: maximum registers of a thread, unless it makes the kernel spill; None for no limit.
    """

    module: str
    function: str
    architecture: int
    signature: Mapping[str, str]
    constants: Mapping[str, Constant]
    called_modules: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.function} for sm_{self.architecture}"


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A compiled kernel and the metadata that a launch needs.

    Attributes:
        cubin: the machine code, for `cuModuleLoadData`.
        name: the function's name in it.
        function: name of the Triton function.
        architecture: compute capability that it was compiled for.
        arguments: (name, Triton's type) of what a launch passes, in order.
        scratch_pointers: null pointers that a launch passes after the arguments, for unused buffers of Triton's.
        constants: values of the constants.
        num_warps: a launch has 32 threads for each, along x.
        shared_bytes: dynamic shared memory of a launch; above 48 KiB the function's attribute must allow it first.
        registers: number of registers of a thread.
        spilled_bytes: registers kept in memory, stores and loads together; 0 in a kernel worth shipping.
        sha256: of the cubin.
        triton: version that compiled it.
        warnings: warnings of the assembler about slow code, such as C7511: matmuls of sm_90's tensor cores wait for
            each other. Shipped kernels have none.
    """

    cubin: Path
    name: str
    function: str
    architecture: int
    arguments: tuple[tuple[str, str], ...]
    scratch_pointers: int
    constants: Mapping[str, Any]
    num_warps: int
    shared_bytes: int
    registers: int
    spilled_bytes: int
    sha256: str
    triton: str
    warnings: tuple[str, ...] = ()

    @property
    def ptx(self) -> Path:
        """The PTX that the cubin was assembled from, beside it in the cache."""
        return self.cubin.with_suffix(".ptx")

    @property
    def metadata(self) -> Path:
        """The JSON file of everything above, beside the cubin."""
        return self.cubin.with_suffix(".json")


def cache_directory() -> Path:
    """Return the directory of compiled kernels, in XDG_CACHE_HOME or in the platform's directory for caches."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        base = Path(os.environ["LOCALAPPDATA"])
    else:
        base = Path.home() / ".cache"
    return base / "hdexport" / "kernels"


def compile_kernels(
    sources: Sequence[KernelSource], *, cache: Path | None = None, processes: int | None = None
) -> tuple[CompiledKernel, ...]:
    """Compile the sources that are not in the cache.

    Args:
        sources: the kernels; a source given twice is compiled once.
        cache: directory to keep the results in, `cache_directory()` by default.
        processes: compilers at a time, one for each core by default.

    Returns:
        The compiled kernels, in the order of `sources`.

    Raises:
        KernelError: Triton or its assembler is missing or rejects a source, or the cache cannot be written; what was
            compiled before is kept.
    """
    directory = cache_directory() if cache is None else cache
    version = _triton_version()
    entries = [directory / _key(source, version) for source in sources]
    missing = {entry: source for entry, source in zip(entries, sources, strict=True) if not _usable(entry)}
    if missing:
        logger.info("compiling %s kernels with Triton %s", len(missing), version)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _compile_all(missing, min(len(missing), processes or os.cpu_count() or 1))
        except OSError as error:
            raise KernelError(
                f"Compiled kernels cannot be kept in {directory}: {error}.\n"
                "Set XDG_CACHE_HOME to a directory that can be written."
            ) from error
    return tuple(_read_entry(entry) for entry in entries)


def read_kernel(metadata: Path) -> CompiledKernel:
    """The kernel whose JSON file that is, with the cubin of the same name beside it.

    Raises:
        KernelError: a file is missing or invalid, or the cubin is not the one that the JSON file describes.
    """
    cubin = metadata.with_suffix(".cubin")
    try:
        fields = json.loads(metadata.read_text(encoding="utf-8"))
        arguments = tuple((str(name), str(kind)) for name, kind in fields.pop("arguments"))
        warnings = tuple(map(str, fields.pop("warnings", ())))
        kernel = CompiledKernel(cubin=cubin, arguments=arguments, warnings=warnings, **fields)
        digest = hashlib.sha256(cubin.read_bytes()).hexdigest()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise KernelError(f"{metadata} does not describe a compiled kernel: {error}. Compile it again.") from error
    if digest != kernel.sha256:
        raise KernelError(f"{cubin} is not the file that {metadata.name} describes. Compile it again.")
    return kernel


def _triton_version() -> str:
    # From the package's metadata: importing Triton would take most of the time that a warm cache has.
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise KernelError(
            "Compiling GPU kernels needs the package 'triton', which is not installed.\n"
            "Install it with: pip install triton (Linux; a machine that only runs a bundle does not need it)."
        ) from None


def _key(source: KernelSource, version: str) -> str:
    """Return a cache key that changes with everything that the machine code depends on."""
    digest = hashlib.sha256()
    for module in (_WORKER, source.module, *source.called_modules):
        digest.update(_file_of(module).read_bytes())
    # As a list: the order of the arguments counts.
    fields = [*dataclasses.asdict(source).items(), list(source.signature), version, list(sys.version_info[:2])]
    digest.update(json.dumps(fields, sort_keys=True).encode())
    return f"{source.function}-sm{source.architecture}-{digest.hexdigest()[:16]}"


def _file_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise KernelError(f"There is no module {module} with a kernel to compile.")
    return Path(spec.origin)


def _read_entry(entry: Path) -> CompiledKernel:
    return read_kernel(entry / f"{entry.name}.json")


def _usable(entry: Path) -> bool:
    if not entry.exists():
        return False
    try:
        _read_entry(entry)
    except KernelError as error:
        logger.warning("%s", error)
        shutil.rmtree(entry, ignore_errors=True)
        return False
    return True


def _compile_all(missing: Mapping[Path, KernelSource], processes: int) -> None:
    """Share the sources out among that many compilers, each taking the next when it has finished one."""
    waiting: queue.SimpleQueue[tuple[Path, KernelSource]] = queue.SimpleQueue()
    for item in missing.items():
        waiting.put(item)
    with ThreadPoolExecutor(processes) as threads:
        for served in [threads.submit(_serve_compiler, waiting) for _ in range(processes)]:
            served.result()


def _serve_compiler(waiting: queue.SimpleQueue[tuple[Path, KernelSource]]) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log, _start_compiler(log.fileno()) as compiler:
        try:
            for entry, source in _taken_from(waiting):
                with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".compiling-") as folder:
                    job = {"source": dataclasses.asdict(source), "stem": str(Path(folder, entry.name))}
                    if _answer(compiler, job) != "done":
                        log.seek(0)
                        output = "\n".join(log.read().strip().splitlines()[-_LOG_LINES:])
                        raise KernelError(f"{source} could not be compiled.\n{output}")
                    _publish(Path(folder), entry)
        except BaseException:
            # The other compilers finish their current source and take no more.
            collections.deque(_taken_from(waiting), maxlen=0)
            raise


def _taken_from(waiting: queue.SimpleQueue[tuple[Path, KernelSource]]) -> Iterator[tuple[Path, KernelSource]]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


def _start_compiler(log: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    # The kernel's module is imported from wherever this process would import it.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8", env=environment,
    )  # fmt: skip


def _answer(compiler: subprocess.Popen[str], job: Mapping[str, object]) -> str:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    try:
        compiler.stdin.write(json.dumps(job) + "\n")
        compiler.stdin.flush()
    except BrokenPipeError:
        return "ended"
    answer = compiler.stdout.readline().strip()
    if not answer:
        compiler.wait()  # its log is complete only then
    return answer


def _publish(folder: Path, entry: Path) -> None:
    """The rename is atomic: other processes see a whole entry or none."""
    os.chmod(folder, 0o755)
    try:
        folder.rename(entry)
    except OSError:
        # Another process may have been faster; its entry is as good.
        if not entry.exists():
            raise
    else:
        folder.mkdir()  # for the temporary directory to remove
