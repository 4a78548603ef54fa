"""The GPU benchmark of block-sparse attention where there is no GPU: what it says and compares, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hdplugins.operators.block_sparse_attention.pairs import pairs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_block_kernels.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_block_kernels

    yield gpu_block_kernels
    for name in ("gpu_block_kernels", "gpu_kernels"):
        sys.modules.pop(name, None)


def test_without_a_gpu_it_says_so_and_exits_with_3(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(results)])
    assert benchmark.main() == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("no GPU: ")
    assert printed.err == ""
    assert not results.exists()


@pytest.mark.parametrize("name", ["_HF_EVAL", "_TABLE", "_ETC"])
@pytest.mark.parametrize("blocks", [1, 3, 11, 12, 20])
def test_flex_attention_sees_the_pairs_that_are_counted(name: str, blocks: int, benchmark: Any) -> None:
    attributes, tokens, heads = getattr(benchmark, name), blocks * benchmark.BLOCK_SIZE, 2
    table = benchmark._random_table(heads, tokens, "cpu") if name == "_TABLE" else None
    seen = benchmark.seen_blocks(blocks, heads, attributes, table, "cpu")
    counted = pairs(tokens=tokens, heads=heads, **attributes, listed_blocks=None if table is None else table.numpy())
    assert int(seen.expand(heads, -1, -1).sum()) * benchmark.BLOCK_SIZE**2 == counted


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_what_the_operator_does_where_no_block_counts_twice(benchmark: Any) -> None:
    from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention

    shape = {"batch": 1, "heads": 2, "tokens": 7 * benchmark.BLOCK_SIZE, "head_dim": 64, "dtype": "float32"}
    # Of blocks 1 to 5, none of which is a neighbour.
    table = torch.tensor([[3, 4, 1, 2, 1], [5, 5, 5, 1, 3]], dtype=torch.int32)[:, :, None]
    torch.manual_seed(0)
    flex = benchmark._flex(shape, "cpu", benchmark._TABLE, table)()
    torch.manual_seed(0)
    tensors, mask = benchmark._tensors(shape, "cpu"), torch.ones(1, shape["tokens"], dtype=torch.int32)
    right, other = (
        block_sparse_attention(*tensors, mask, listed, **benchmark._TABLE, scale=0.125)
        for listed in (table, table.flip(0))
    )
    torch.testing.assert_close(flex, right, atol=2e-6, rtol=0)
    assert (flex - other).abs().max() > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("dtypes", [("float16",), ("float32",)], ids=str)
def test_the_check_that_precedes_timing_runs_the_kernel(dtypes: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gpu_block_kernels, gpu_kernels, torch\n"
        "from hdplugins.operators.block_sparse_attention import reference\n"
        "from hdplugins.kernels.attention_tiles import Tiles\n"
        "gpu_kernels.DTYPES = sys.argv[2:]\n"
        "def check():\n"
        "    torch.manual_seed(0)\n"
        "    return list(gpu_block_kernels.check_answers('cpu', tiles=Tiles(64, 64, 4, 2, 32), head_dims=(32,)))\n"
        # The same questions are asked twice: the interpreter, which takes seconds, answers them once.
        "answers, attention_call = [], gpu_block_kernels.attention_call\n"
        "def asked(*given, **rest):\n"
        "    answers.append(attention_call(*given, **rest)())\n"
        "    return lambda: answers[-1]\n"
        "gpu_block_kernels.attention_call = asked\n"
        "problems = check()\n"
        "assert problems == [], problems\n"
        "again = iter(answers)\n"
        "gpu_block_kernels.attention_call = lambda *_, **__: lambda: next(again)\n"
        "attention = reference.block_sparse_attention\n"
        "reference.block_sparse_attention = lambda *tensors, window, **rest: attention(*tensors, window=0, **rest)\n"
        "print(len(check()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPT.parent), *dtypes],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Of two lengths and three modes, only the long ones notice a window that is narrower by a block.
    assert done.stdout.strip() == "3"
