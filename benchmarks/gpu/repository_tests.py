"""The step that runs the repository's own tests of GPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.job import Job, SkippedError, StepFailedError

_ROOT = Path(__file__).parents[2]
_MARK = "mark.gpu"
_LINES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
_KEPT_REASONS = 40


def gpu_tests() -> list[str]:
    """The files with a test marked ``gpu``, from the repository's root: no list, in which one could be missing."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(_ROOT)) for file in files if _MARK in file.read_text()]


def check(job: Job) -> None:
    """Run the repository's tests marked ``gpu``, each file in a process, side by side; the row has one line a test."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("the package 'pytest' is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rA", "-q", "-p", "no:cacheprovider"]

    def run(file: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, file], cwd=_ROOT, capture_output=True, text=True, check=False)

    files = gpu_tests()
    with ThreadPoolExecutor(len(files)) as pool:
        done = dict(zip(files, pool.map(run, files), strict=True))
    lines = []
    for file, ended in done.items():
        found = [line for line in ended.stdout.splitlines() if line.startswith(_LINES)]
        if not found:
            found = [
                f"ERROR {file}: pytest ended with {ended.returncode}: {ended.stderr[-300:] or ended.stdout[-300:]}"
            ]
        lines += found
        reasons = [line for line in ended.stdout.splitlines() if line.startswith("E  ")]
        job.write(case="tests", file=file, exit_code=ended.returncode, lines=found, reasons=reasons[:_KEPT_REASONS])
    # A whole file may need a package that is missing here.
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR")) and "ModuleNotFoundError" not in line]
    if bad:
        raise StepFailedError("; ".join(bad))
    if not any(line.startswith("PASSED") for line in lines):
        raise SkippedError(f"no test ran: {lines[0]}")
