"""The step that runs the repository's own tests of GPUs."""

from __future__ import annotations

__all__ = ["check", "gpu_tests"]

import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.job import Job, SkippedError, StepFailedError

_ROOT = Path(__file__).parents[2]
_MARK = "mark.gpu"


def gpu_tests() -> list[str]:
    """The files with a test marked ``gpu``, from the repository's root: no list, in which one could be missing."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(_ROOT)) for file in files if _MARK in file.read_text()]


def check(job: Job) -> None:
    """Run the repository's tests marked ``gpu``; the row holds one line per test."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("the package 'pytest' is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rA", "-q", "-p", "no:cacheprovider", *gpu_tests()]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))]
    job.write(case="tests", exit_code=done.returncode, lines=lines)
    # A whole file may need a package that is missing here.
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR")) and "ModuleNotFoundError" not in line]
    if bad or not lines:
        raise StepFailedError(f"pytest ended with {done.returncode}: {'; '.join(bad) or done.stderr[-500:]}")
    if not any(line.startswith("PASSED") for line in lines):
        raise SkippedError(f"no test ran: {lines[0]}")
