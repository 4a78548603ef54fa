"""The benchmark of GPU kernels where there is no GPU: what it counts, and that it refuses wrong answers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.cases.blocks import BLOCK_SIZE, ETC, HF_EVAL, TABLE, BlockCase
from benchmarks.gpu.cases.chunks import ChunkCase
from benchmarks.gpu.cases.distances import DistanceCase
from benchmarks.gpu.cases.window import WindowCase
from benchmarks.gpu.job import Job, StepFailedError
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.picture import picture
from benchmarks.roofline.ceilings import Ceilings

ROOT = Path(__file__).parents[2]


def test_rates_count_the_work_inside_the_window_and_the_roofline_is_the_slower_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two texts of 20 tokens in three heads of 64; a token sees 4 + 1 + 5 others, but at the ends, and one global."""
    monkeypatch.setattr(kernels, "times_ms", lambda call, **_: [3.0, 2.0, 2.0, 1.0])
    case = WindowCase(batch=2, heads=3, tokens=20, head_dim=64, dtype="float16", left=4, right=5, globals=1)
    offset = torch.arange(20) - torch.arange(20)[:, None]
    seen = ((offset >= -4) & (offset <= 5)) | (torch.arange(20) < 1)
    flops, moved_bytes = 4 * 64 * 2 * 3 * int(seen.sum()), 4 * (2 * 3 * 20 * 64) * 2
    for flops_per_s, bytes_per_s, roofline_ms in ((flops, 1e12, 1e3), (1e12, moved_bytes / 2, 2e3)):
        ceilings = Ceilings(
            device="cuda", dtype="float16", matmul_flops_per_s=flops_per_s, copy_bytes_per_s=bytes_per_s
        )
        row = kernels.timed_row("window", case, lambda: None, ceilings)
        assert row["tflops"] == pytest.approx(flops / 2e-3 / 1e12)
        assert row["roofline_ms"] == pytest.approx(roofline_ms)
        assert (row["median_ms"], row["left"], row["globals"]) == (2.0, 4, 1)


def test_a_wrong_answer_is_refused() -> None:
    right = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    right[:, :, 5] = 0
    assert kernels.compare(right.float(), right, right.float()) is None
    for value, message in ((torch.nan, "not finite"), (torch.inf, "not finite"), (1e-3, "error")):
        wrong = right.float()
        wrong[0, 1, 3, 4] += value
        assert message in kernels.compare(wrong, right, right.float())
    assert "not 0" in kernels.compare(right.float() + 1e-9, right, right.float())
    assert "error" in kernels.compare(right.roll(1, 3).float(), right, right.float())


def test_flex_attention_sees_the_pairs_that_are_counted() -> None:
    for kind, blocks in ((HF_EVAL, 1), (HF_EVAL, 12), (TABLE, 3), (TABLE, 20), (ETC, 11), (ETC, 12)):
        tokens = blocks * BLOCK_SIZE
        listed = BlockCase.inner_blocks(tokens) if kind is TABLE else None
        case = BlockCase(batch=1, heads=2, tokens=tokens, head_dim=64, dtype="float32", blocks=kind, listed=listed)
        assert int(case.seen_blocks("cpu").expand(2, -1, -1).sum()) * BLOCK_SIZE**2 == case.pairs(), (kind, blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_what_the_operator_does_where_no_block_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hdplugins.attention.blocks.reference import block_sparse_attention

    shape = {"batch": 1, "heads": 2, "tokens": 7 * BLOCK_SIZE, "head_dim": 64, "dtype": "float32"}
    case = BlockCase(**shape, blocks=TABLE, listed=(1, 5))
    # Of blocks 1 to 5, none of which is a neighbour.
    table = torch.tensor([[3, 4, 1, 2, 1], [5, 5, 5, 1, 3]], dtype=torch.int32)[:, :, None]
    monkeypatch.setattr(BlockCase, "table", lambda *_: table)
    torch.manual_seed(0)
    flex = kernels._call(case, "cpu", "flex")()
    torch.manual_seed(0)
    *tensors, _ = case.tensors("cpu")
    right, other = (block_sparse_attention(*tensors, listed, **case.attributes) for listed in (table, table.flip(0)))
    torch.testing.assert_close(flex, right, atol=2e-6, rtol=0)
    assert (flex - other).abs().max() > 1e-3


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_what_the_operator_does_in_windows_and_chunks() -> None:
    shape = {"batch": 1, "heads": 2, "head_dim": 64, "dtype": "float32"}
    for case, wrong in (
        *((WindowCase(**shape, tokens=50, left=4, right=5, globals=leading), {"left": 5}) for leading in (0, 1)),
        *((ChunkCase(**shape, tokens=tokens, chunk=16), {"chunk": 8}) for tokens in (30, 64)),
    ):
        torch.manual_seed(0)
        flex = kernels._call(case, "cpu", "flex")()
        torch.manual_seed(0)
        tensors = case.tensors("cpu")
        assert kernels.difference(case, tensors, flex) is None
        assert "error" in kernels.difference(dataclasses.replace(case, **wrong), tensors, flex)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_peers_of_attention_by_distance_compute_what_the_operator_does() -> None:
    """Numbers of the next distance instead are a wrong answer."""
    case = DistanceCase(batch=1, heads=2, head_dim=64, dtype="float32", tokens=50, reach=8)
    torch.manual_seed(0)
    tensors = case.tensors("cpu")
    *others, numbers, values = tensors
    for peer in ("flex", "definition"):
        assert case.is_computed_by(peer)
        answer = PEERS[peer].prepare(case, tensors)()
        assert kernels.difference(case, tensors, answer) is None
        assert "error" in kernels.difference(case, [*others, numbers.roll(1, -1), values], answer)


def test_a_peer_whose_answers_are_not_ours_fails_the_step_after_all_were_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is a token wider; a peer that fails otherwise is a row, and the step goes on."""
    wrong: dict[str, int] = {}

    def call_of(case: WindowCase, device: str, computed_by: str) -> Any:
        if computed_by == "sdpa flash":
            raise RuntimeError("no kernel for this")
        torch.manual_seed(0)
        seen = dataclasses.replace(case, left=case.left + wrong.get(computed_by, 0))
        tensors = case.tensors(device)
        return lambda: seen.OPERATOR.definition(*tensors, **seen.attributes)

    monkeypatch.setattr(kernels, "_call", call_of)
    job = Job(step="kernels-d64", output=tmp_path / "rows.jsonl", rehearsal=True)
    kernels.time_kernels(job, "window", (64,))
    wrong["flex"] = 1
    with pytest.raises(StepFailedError, match=r"FlexAttention window, .*: its answers differ from ours by"):
        kernels.time_kernels(job, "window", (64,))
    rows = [json.loads(line) for line in job.output.read_text().splitlines()]
    refused = [row["name"] for row in rows if row["case"] == "refused"]
    assert refused == ["torch SDPA dense, flash", "FlexAttention window", "torch SDPA dense, flash"]
    assert all(row["difference"] == 0 for row in rows if row["case"] == "torch SDPA dense, cuDNN")


def test_the_picture_has_every_line_of_the_committed_results() -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu_h100.jsonl").read_text().splitlines()]
    chart = picture(rows).to_dict()
    windows, dense = (chart["datasets"][panel["data"]["name"]] for panel in chart["hconcat"])
    for points in (windows, dense):
        assert len(points) == 4 * 6
        assert {point["tokens"] for point in points if point["who"] == "hdexport"} == set(kernels.LENGTHS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "cases"),
    [("window", 8), ("blocks --tune", 2), ("chunks", 4), ("lsh", 3), ("distances", 5), ("relative", 4)],
    ids=["window", "blocks", "chunks", "lsh", "distances", "relative"],
)
def test_the_kernels_of_one_operator_can_be_requested(options: str, cases: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "kernels", *options.split(), "--output", output]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("answers are right in every dtype and head_dim\n")
    answers, *rows = map(json.loads, output.read_text().splitlines())
    assert answers["problems"] == []
    assert len(rows) == cases == done.stdout.count(": rehearsed\n")
    assert all(row["rehearsal"] and row["command"].startswith("python -m benchmarks.gpu ") for row in rows)
    assert ("block_config" in rows[0]) == ("--tune" in options)
