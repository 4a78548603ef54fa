"""The step that runs the repository's own tests of GPUs."""

from __future__ import annotations

__all__ = ["check"]

import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.job import Job, SkippedError, StepFailedError

_ROOT = Path(__file__).parents[2]
_GPU_TESTS = (
    "tests/plugins/kernels/test_cuda_launch.py",
    "tests/plugins/kernels/test_sparse_kernel.py",
    "tests/runtime/backends/tensorrt/test_gpu.py",
)


def check(job: Job) -> None:
    """Run the repository's tests marked ``gpu``; the row holds one line per test."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("the package 'pytest' is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rA", "-q", "-p", "no:cacheprovider", *_GPU_TESTS]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))]
    job.write(case="tests", exit_code=done.returncode, lines=lines)
    # A whole file may need a package that is missing here.
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR")) and "ModuleNotFoundError" not in line]
    if bad or not lines:
        raise StepFailedError(f"pytest ended with {done.returncode}: {'; '.join(bad) or done.stderr[-500:]}")
    if not any(line.startswith("PASSED") for line in lines):
        raise SkippedError(f"no test ran: {lines[0]}")
