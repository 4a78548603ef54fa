"""The GPU benchmark where there is no GPU: what it says, what it counts, and that it refuses wrong answers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_kernels.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_exits_with_3(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--output", results],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("no GPU: ")
    assert not results.exists()


@pytest.mark.parametrize(("left", "right", "globals_"), [(3, 3, 0), (2, 5, 1), (4, 0, 7), (50, 50, 2)])
def test_the_work_counted_is_that_of_the_operator(left: int, right: int, globals_: int, benchmark: ModuleType) -> None:
    shape = benchmark.Shape(
        batch=2, heads=3, tokens=20, head_dim=64, dtype="float16", left=left, right=right, globals=globals_
    )
    offset = torch.arange(20) - torch.arange(20)[:, None]
    seen = ((offset >= -left) & (offset <= right)) | (torch.arange(20) < globals_)
    assert benchmark.pairs(shape) == 2 * 3 * int(seen.sum())


def test_a_wrong_answer_is_refused(benchmark: ModuleType) -> None:
    right = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    right[:, :, 5] = 0
    assert benchmark.compare(right.float(), right, right.float()) is None
    for value, message in ((torch.nan, "not finite"), (torch.inf, "not finite"), (1e-3, "error")):
        wrong = right.float()
        wrong[0, 1, 3, 4] += value
        assert message in benchmark.compare(wrong, right, right.float())
    assert "not 0" in benchmark.compare(right.float() + 1e-9, right, right.float())
    assert "error" in benchmark.compare(right.roll(1, 3).float(), right, right.float())


def test_the_check_that_precedes_timing_runs_the_kernel() -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gpu_kernels import check_answers\n"
        "from hdplugins.sliding_window_attention import reference\n"
        "from hdplugins.sliding_window_attention.geometry import Geometry\n"
        "check = lambda: list(check_answers('cpu', geometry=Geometry(64, 32, 16, 4, 2, 32), head_dims=(32,)))\n"
        "assert check() == [], check()\n"
        "attention = reference.sliding_window_attention\n"
        "wider = lambda *tensors, left, **rest: attention(*tensors, left=left + 1, **rest)\n"
        "reference.sliding_window_attention = wider\n"
        "print(len(check()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPT.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Of two lengths in two dtypes, only the long one notices a window that is wider by one.
    assert done.stdout.strip() == "2"
