"""The steps about the kernel of sliding-window attention: its answers, its speed, and what the compiler made of it."""

from __future__ import annotations

__all__ = ["check", "check_gpu_tests", "check_shipped", "count_registers", "time_kernels"]

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_kernels
from gpu_suite.job import Job, SkippedError, StepFailedError
from hdexport.bench.ceilings import measured_ceilings
from hdexport.bench.results import Ceilings
from hdplugins.sliding_window_attention.geometry import Geometry

_ROOT = Path(__file__).parents[2]
_GPU_TESTS = ("tests/plugins/test_cuda_launch.py", "tests/runtime/tensorrt/test_gpu.py")

_LENGTHS = (4096, 512, 16384, 1024, 2048, 8192)
"""In order of what a cut should lose last."""

_WINDOW = 256
_TOTAL_TOKENS = 65536

_SMALL_TILES = Geometry(64, 32, 16, 4, 2, 32)
_NO_CEILINGS = Ceilings(device="cpu", dtype="float16", matmul_flops_per_s=1.0, copy_bytes_per_s=1.0)
"""Of a rehearsal, which claims nothing about time."""

_PREFIX = "SlidingWindowAttention-"
_FUNCTIONS = ("plan_keys", "attend")


def check(job: Job, head_dims: Sequence[int]) -> None:
    """The kernel's answers in every dtype, against the operator's definition in float64."""
    for head_dim in (32,) if job.rehearsal else head_dims:
        geometry = _SMALL_TILES if job.rehearsal else None
        problems = list(gpu_kernels.check_answers(job.device, geometry=geometry, head_dims=(head_dim,)))
        job.write(case="answers", head_dim=head_dim, problems=problems)
        if problems:
            raise StepFailedError(f"{len(problems)} wrong answers, the first: {problems[0]}")


def time_kernels(job: Job, head_dims: Sequence[int]) -> None:
    """The kernel against SDPA and FlexAttention, at every length."""
    if job.rehearsal:
        shapes: dict[str, Any] = {"window": 8, "total_tokens": 32, "ceilings": _NO_CEILINGS}
        rows = gpu_kernels.timed_rows((32,), (128,), device="cpu", **shapes)
    else:
        ceilings = measured_ceilings("cuda", "float16")
        rows = gpu_kernels.timed_rows(
            _LENGTHS, head_dims, window=_WINDOW, total_tokens=_TOTAL_TOKENS, ceilings=ceilings, device="cuda"
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
    from hdplugins.aot import compile_kernels
    from hdplugins.sliding_window_attention import tensorrt_plugin as face
    from hdplugins.sliding_window_attention.geometry import cubin_architecture

    architecture = gpu_kernels.architecture_of(job.device)
    attributes = {"left": 100, "right": 90, "dilation": (1, 1, 3), "global_bound": 8, "scale": 0.125}
    batch, heads, tokens, head_dim = 2, 3, 333, 64
    shapes = ((batch, heads, tokens, head_dim),) * 3 + ((batch, tokens),)
    with tempfile.TemporaryDirectory() as folder:
        sources = face.kernel_sources(shapes, dtype="float16", architectures=[cubin_architecture(architecture)])
        for kernel in compile_kernels(sources):
            for file in (kernel.cubin, kernel.metadata):
                shutil.copyfile(file, Path(folder) / (_PREFIX + file.name))
        problem = _problem_of_shipped(job, Path(folder), architecture, shapes, attributes)
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


def _problem_of_shipped(
    job: Job, folder: Path, architecture: int, shapes: Sequence[tuple[int, ...]], attributes: dict[str, Any]
) -> str | None:
    import torch

    from hdplugins.cuda_launch import LoadedKernel, PreparedLaunch, find_kernels, load_kernels
    from hdplugins.sliding_window_attention import tensorrt_plugin as face
    from hdplugins.sliding_window_attention.reference import sliding_window_attention

    def serves(kernel: Any) -> bool:
        return face.serves(kernel, shapes, dtype="float16")

    if job.rehearsal:
        found = find_kernels(folder, _PREFIX, _FUNCTIONS, architecture=architecture, serves=serves)
        kernels = {name: LoadedKernel(compiled=kernel, function=None, driver=None) for name, kernel in found.items()}
    else:
        torch.cuda.init()
        kernels = load_kernels(folder, _PREFIX, _FUNCTIONS, serves=serves)
    query, key, value = (torch.randn(shapes[0], dtype=torch.float16, device=job.device) for _ in range(3))
    token_kind = torch.ones(shapes[3], dtype=torch.int32, device=job.device)
    token_kind[0, -80:], token_kind[1, ::90] = 0, 2
    out = torch.full_like(query, torch.nan)
    plan_bytes = face.workspace(shapes, attributes)["plan"]
    plan = torch.full((plan_bytes,), 0xFF, dtype=torch.uint8, device=job.device)
    tensors = {"query": query, "key": key, "value": value, "token_kind": token_kind, "out": out, "plan": plan}
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
    window = {name: attributes[name] for name in ("left", "right", "dilation", "scale")}
    halves = [tensor.cpu() for tensor in (query, key, value)]
    right = sliding_window_attention(*(half.double() for half in halves), token_kind.cpu(), **window)
    return gpu_kernels.compare(out.cpu(), right, sliding_window_attention(*halves, token_kind.cpu(), **window))
