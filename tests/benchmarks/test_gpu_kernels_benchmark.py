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

from hdexport.bench.results.result import Ceilings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_exits_with_3(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(results)])
    assert benchmark.main() == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("no GPU: ")
    assert printed.err == ""
    assert not results.exists()


def test_rates_count_the_work_inside_the_window_and_the_roofline_is_the_slower_of_two(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts of 20 tokens in three heads of 64; a token sees 4 + 1 + 5 others, but at the ends, and one global."""
    monkeypatch.setattr(benchmark, "times_ms", lambda call, **_: [3.0, 2.0, 2.0, 1.0])
    shape = benchmark.Shape(batch=2, heads=3, tokens=20, head_dim=64, dtype="float16", left=4, right=5, globals=1)
    offset = torch.arange(20) - torch.arange(20)[:, None]
    seen = ((offset >= -4) & (offset <= 5)) | (torch.arange(20) < 1)
    flops, moved_bytes = 4 * 64 * 2 * 3 * int(seen.sum()), 4 * (2 * 3 * 20 * 64) * 2
    for flops_per_s, bytes_per_s, roofline_ms in ((flops, 1e12, 1e3), (1e12, moved_bytes / 2, 2e3)):
        ceilings = Ceilings(
            device="cuda", dtype="float16", matmul_flops_per_s=flops_per_s, copy_bytes_per_s=bytes_per_s
        )
        row = benchmark._row("window", shape, lambda: None, ceilings)
        assert row["tflops"] == pytest.approx(flops / 2e-3 / 1e12)
        assert row["roofline_ms"] == pytest.approx(roofline_ms)
        assert (row["median_ms"], row["left"], row["globals"]) == (2.0, 4, 1)


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


@pytest.mark.nightly
@pytest.mark.parametrize("dtypes", [("float16",), ("float32",)], ids=str)
def test_the_check_that_precedes_timing_runs_the_kernel(dtypes: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gpu_kernels, torch\n"
        "from gpu_kernels import check_answers, timed_rows\n"
        "from hdexport.bench.results.result import Ceilings\n"
        "from hdplugins.operators.sliding_window_attention import reference\n"
        "from hdplugins.kernels.attention_tiles import Tiles\n"
        "gpu_kernels.DTYPES = sys.argv[2:]\n"
        "def check():\n"
        "    torch.manual_seed(0)\n"
        "    return list(check_answers('cpu', tiles=Tiles(128, 128, 4, 2, 32), head_dims=(32,)))\n"
        # The same questions are asked twice: the interpreter, which takes seconds, answers them once.
        "answers, attention_call = [], gpu_kernels.attention_call\n"
        "def asked(*given, **rest):\n"
        "    answers.append(attention_call(*given, **rest)())\n"
        "    return lambda: answers[-1]\n"
        "gpu_kernels.attention_call = asked\n"
        "problems = check()\n"
        "assert problems == [], problems\n"
        "again = iter(answers)\n"
        "gpu_kernels.attention_call = attention_call\n"
        "gpu_kernels.times_ms = lambda call, **_: (call(), [1.0, 1.0])[1]\n"
        "nothing = Ceilings(device='cpu', dtype='float16', matmul_flops_per_s=1, copy_bytes_per_s=1)\n"
        "rows = timed_rows((32,), (128,), window=8, total_tokens=32, ceilings=nothing, device='cpu')\n"
        "assert len(list(rows)) == 5\n"
        "attention = reference.sliding_window_attention\n"
        "wider = lambda *tensors, left, **rest: attention(*tensors, left=left + 1, **rest)\n"
        "reference.sliding_window_attention = wider\n"
        "gpu_kernels.attention_call = lambda *_, **__: lambda: next(again)\n"
        "print(len(check()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPT.parent), *dtypes],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Of two lengths, only the long one notices a window that is wider by one.
    assert done.stdout.strip() == "1"
