"""The step that runs the repository's own tests of GPUs."""

from __future__ import annotations

__all__ = ["check"]

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.job import Job, SkippedError, StepFailedError

_ROOT = Path(__file__).parents[2]
_GPU_TESTS = (
    "tests/plugins/kernels/test_cuda_launch.py",
    "tests/plugins/kernels/test_sparse_kernel.py",
    "tests/runtime/backends/tensorrt/test_gpu.py",
)


def check(job: Job) -> None:
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


def _outcomes(report: Path) -> Iterator[dict[str, str | None]]:
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        found = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        reason = None if found is None else f"{found.get('message') or ''} {found.text or ''}".strip()[:1000]
        outcome = "passed" if found is None else found.tag
        if outcome == "error" and reason and "ModuleNotFoundError" in reason:
            outcome = "skipped"  # a whole file that needs a package which is not here
        yield {"test": case.get("name"), "outcome": outcome, "reason": reason}
