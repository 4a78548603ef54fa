"""Our operators in each version of ONNX Runtime that pyproject.toml allows: their tests, run again.

`make test-all` installs the versions, each in a folder: the installed one is that of constraints.txt, and its tests are
run without this file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from hdplugins.onnxruntime.operators import library_path

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(library_path() is None, reason="the launcher was not built: pip install --editable ."),
]

FOLDERS = sorted(Path(sys.prefix, "onnxruntimes").glob("*"))
"""With a version's name, empty where it has no wheel for this Python."""

ROOT = Path(__file__).parents[3]
OPERATOR_TESTS = Path(__file__).with_name("test_kernel_operators.py")
BUNDLE_TESTS = ROOT / "tests" / "runtime" / "backends" / "test_onnxruntime_kernels.py"
CHOSEN = (
    "(right_answers or share or python_is_entered or without or what_fails or two_sessions or a_block_index_of_other "
    "or a_fork or has_no_branch or by_shared_numbers) and not answers_alike"
)
"""All but those that start no session, and of bundles those whose functions ONNX Runtime's own attention is in."""


def test_the_versions_begin_at_the_lower_bound() -> None:
    if not FOLDERS:
        pytest.skip("make test-all installs them")
    (bound,) = re.findall(r'"onnxruntime>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert min((folder.name for folder in FOLDERS), key=Version) == bound


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.name))
def test_registered_operators_win_over_functions(folder: Path) -> None:
    if not (folder / "onnxruntime").exists():
        pytest.skip(f"ONNX Runtime {folder.name} has no wheel for this Python")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
    found = subprocess.run(
        [sys.executable, "-c", "import onnxruntime; print(onnxruntime.__version__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == folder.name
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, OPERATOR_TESTS, BUNDLE_TESTS],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
