"""The step that runs the shipped kernels under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from benchmarks.gpu.job import Job, SkippedError, StepFailedError

_FOUND = 9
"""The exit status that the sanitizer is told to end with where it found something."""

_KEPT_LINES = 40


def check(job: Job, tool: str) -> None:
    """Start every operator's kernels, as a bundle has them, under the tool.

    Calls of the driver that fail are not reported: cuda-python asks an older driver for functions that it lacks.
    PyTorch allocates every tensor by itself there, so that a kernel that leaves its tensor is seen.

    Args:
        job: of the step; a rehearsal has no GPU, which the tool needs.
        tool: of the sanitizer: ``memcheck``, ``racecheck``.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None or job.rehearsal:
        raise SkippedError(
            "compute-sanitizer, of NVIDIA's toolkit, is not installed" if sanitizer is None else "no GPU"
        )
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "application-only",
        "--print-limit", "20", "--report-api-errors", "no",
        sys.executable, "-m", "benchmarks.gpu", "--step", "shipped-kernels",
    ]  # fmt: skip
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    job.write(case="sanitizer", tool=tool, exit_code=done.returncode, said=said[:_KEPT_LINES] + said[-2:])
    if done.returncode:
        raise StepFailedError(f"{tool} ended with {done.returncode}: {' '.join(said[-2:]) or done.stderr[-300:]}")
