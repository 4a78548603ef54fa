"""The steps about the kernel of sliding-window attention: its answers, its speed, and what the compiler made of it."""

from __future__ import annotations

__all__ = [
    "LENGTHS",
    "NO_CEILINGS",
    "TOTAL_TOKENS",
    "check",
    "check_gpu_tests",
    "check_plugin_kernels",
    "check_shipped",
    "count_registers",
    "time_kernels",
    "write_answers",
]

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gpu_kernels
from gpu_suite.job import Job, SkippedError, StepFailedError
from hdexport.bench.measure.ceilings import measured_ceilings
from hdexport.bench.results.result import Ceilings
from hdplugins import OPERATORS, Operator
from hdplugins.kernels.attention_tiles import Tiles, cubin_architecture
from hdplugins.kernels.cuda_launch import LoadedKernel, PreparedLaunch, find_kernels, load_kernels
from hdplugins.operators.plugin_face import face_of

_ROOT = Path(__file__).parents[2]
_GPU_TESTS = (
    "tests/plugins/kernels/test_cuda_launch.py",
    "tests/plugins/kernels/test_block_sparse_kernel.py",
    "tests/runtime/backends/tensorrt/test_gpu.py",
)

LENGTHS = (4096, 512, 16384, 1024, 2048, 8192)
"""In order of what a cut should lose last."""

_WINDOW = 256
TOTAL_TOKENS = 65536

_SMALL_TILES = Tiles(64, 32, 4, 2, 32)
NO_CEILINGS = Ceilings(device="cpu", dtype="float16", matmul_flops_per_s=1.0, copy_bytes_per_s=1.0)
"""Of a rehearsal, which claims nothing about time."""


def check(job: Job, head_dims: Sequence[int]) -> None:
    """The kernel's answers in every dtype, against the operator's definition in float64."""
    for head_dim in (32,) if job.rehearsal else head_dims:
        tiles = _SMALL_TILES if job.rehearsal else None
        write_answers(job, head_dim, gpu_kernels.check_answers(job.device, tiles=tiles, head_dims=(head_dim,)))


def write_answers(job: Job, head_dim: int, found: Iterable[str]) -> None:
    """Record what is wrong with a kernel, and fail if anything is."""
    problems = list(found)
    job.write(case="answers", head_dim=head_dim, problems=problems)
    if problems:
        raise StepFailedError(f"{len(problems)} wrong answers, the first: {problems[0]}")


def time_kernels(job: Job, head_dims: Sequence[int]) -> None:
    """The kernel against SDPA and FlexAttention, at every length."""
    if job.rehearsal:
        shapes: dict[str, Any] = {"window": 8, "total_tokens": 32, "ceilings": NO_CEILINGS}
        rows = gpu_kernels.timed_rows((32,), (128,), device="cpu", **shapes)
    else:
        ceilings = measured_ceilings("cuda", "float16")
        rows = gpu_kernels.timed_rows(
            LENGTHS, head_dims, window=_WINDOW, total_tokens=TOTAL_TOKENS, ceilings=ceilings, device="cuda"
        )
    for row in rows:
        job.write(**row)


def count_registers(job: Job) -> None:
    """Registers and spills of every kernel for this GPU, compiled ahead of time as a build does."""
    architecture = gpu_kernels.architecture_of(job.device)
    some = {"dtypes": ("float16",), "head_dims": (32,)} if job.rehearsal else {}
    for row in gpu_kernels.compiled_rows(architectures=(architecture,), **some):
        job.write(**row)


def check_shipped(job: Job) -> None:
    """Kernels as a bundle has them: compiled ahead of time, loaded and launched through the driver, and right.

    It is the plugin's way but for TensorRT around it. A rehearsal does all but load and start them.
    """
    import torch

    from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention

    attributes = {"left": 100, "right": 90, "dilation": (1, 1, 3), "global_bound": 8, "scale": 0.125}
    token_kind = torch.ones((2, 333), dtype=torch.int32)
    token_kind[0, -80:], token_kind[1, ::90] = 0, 2
    check_plugin_kernels(job, OPERATORS["SlidingWindowAttention"], (token_kind,), attributes, sliding_window_attention)


def check_plugin_kernels(
    job: Job, operator: Operator, masks: Sequence[Any], attributes: dict[str, Any], reference: Callable[..., Any]
) -> None:
    """Check an operator's shipped kernels on random texts of 3 heads of 64.

    Args:
        job: of the step.
        operator: one with a plugin.
        masks: the inputs behind query, key and value; the first is [batch, tokens].
        attributes: of the operator.
        reference: its definition.
    """
    from hdplugins.kernels.aot import compile_kernels

    face = face_of(operator)
    architecture = gpu_kernels.architecture_of(job.device)
    query = (masks[0].shape[0], 3, masks[0].shape[1], 64)
    shapes = [query, query, query, *(tuple(mask.shape) for mask in masks)]
    with tempfile.TemporaryDirectory() as folder:
        compiled_for = [cubin_architecture(architecture)]
        sources = face.kernel_sources(shapes, attributes, dtype="float16", architectures=compiled_for)
        for kernel in compile_kernels(sources):
            for file in (kernel.cubin, kernel.metadata):
                shutil.copyfile(file, Path(folder) / f"{operator.name}-{file.name}")
        found = _loaded(job, Path(folder), operator, architecture, shapes, attributes)
    problem = _problem_of(job, found, operator, shapes, masks, attributes, reference)
    job.write(case="shipped kernels", architecture=architecture, problem=problem)
    if problem:
        raise StepFailedError(problem)


def check_gpu_tests(job: Job) -> None:
    """The repository's tests marked ``gpu``, a row each."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("the package 'pytest' is not installed")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run([*command, *_GPU_TESTS], cwd=_ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise StepFailedError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        outcomes = list(_outcomes(report))
    for row in outcomes:
        job.write(**row)
    bad = [row["test"] for row in outcomes if row["outcome"] in ("failure", "error")]
    if bad:
        raise StepFailedError(f"{len(bad)} of {len(outcomes)} tests failed: {', '.join(bad)}")
    if all(row["outcome"] == "skipped" for row in outcomes):
        raise SkippedError(f"every test skips itself: {outcomes[0]['reason'] if outcomes else 'there is none'}")


def _outcomes(report: Path) -> Any:
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        found = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        reason = None if found is None else f"{found.get('message') or ''} {found.text or ''}".strip()[:1000]
        outcome = "passed" if found is None else found.tag
        if outcome == "error" and reason and "ModuleNotFoundError" in reason:
            outcome = "skipped"  # a whole file that needs a package which is not here
        yield {"test": case.get("name"), "outcome": outcome, "reason": reason}


def _loaded(
    job: Job,
    folder: Path,
    operator: Operator,
    architecture: int,
    shapes: Sequence[tuple[int, ...]],
    attributes: dict[str, Any],
) -> dict[str, LoadedKernel]:
    import torch

    face, prefix = face_of(operator), f"{operator.name}-"

    def serves(kernel: Any) -> bool:
        return face.serves(kernel, shapes, attributes, dtype="float16")

    if job.rehearsal:
        found = find_kernels(folder, prefix, face.KERNELS, architecture=architecture, serves=serves)
        return {name: LoadedKernel(compiled=kernel, function=None, driver=None) for name, kernel in found.items()}
    torch.cuda.init()
    return load_kernels(folder, prefix, face.KERNELS, serves=serves)


def _problem_of(
    job: Job,
    kernels: dict[str, LoadedKernel],
    operator: Operator,
    shapes: Sequence[tuple[int, ...]],
    masks: Sequence[Any],
    attributes: dict[str, Any],
    reference: Callable[..., Any],
) -> str | None:
    import torch

    face = face_of(operator)
    texts = [torch.randn(shape, dtype=torch.float16, device=job.device) for shape in shapes[:3]]
    out = torch.full_like(texts[0], torch.nan)
    scratch = {
        name: torch.full((size,), 0xFF, dtype=torch.uint8, device=job.device)
        for name, size in face.workspace(shapes, attributes).items()
    }
    given = [*texts, *(mask.to(job.device) for mask in masks)]
    tensors = {**dict(zip(operator.inputs, given, strict=False)), face.OUTPUT: out, **scratch}
    places = {name: place for place, name in enumerate(tensors)}
    constants = {name: kernel.compiled.constants for name, kernel in kernels.items()}
    launches = [
        PreparedLaunch(kernels[launch.kernel], launch, places)
        for launch in face.launches(shapes, attributes, constants=constants)
    ]
    if job.rehearsal:
        return None
    driver = kernels["attend"].driver
    for launch in launches:
        launch.start([tensor.data_ptr() for tensor in tensors.values()], driver.CUstream(0))
    torch.cuda.synchronize()
    semantic = {name: value for name, value in attributes.items() if name != "global_bound"}
    halves = [tensor.cpu() for tensor in texts]
    right = reference(*(half.double() for half in halves), *masks, **semantic)
    return gpu_kernels.compare(out.cpu(), right, reference(*halves, *masks, **semantic))
