"""The benchmark of large embedders: its goals, its check of embeddings, and programs on a small model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import large
from benchmarks.cpu.large import EMBEDDERS, REFERENCE, check_cosines, goals, least_cosines

INT8, BFLOAT16 = "hdexport openvino int8", "hdexport openvino bfloat16"
Q8_0, LIBRARY = "llama.cpp Q8_0", "sentence-transformers bfloat16"


def figures(rate: float, peak_bytes: float) -> dict[str, Any]:
    return {"tokens_per_s": {"128": rate}, "peak_bytes": peak_bytes}


def test_goals_are_met_or_missed_by_their_figures() -> None:
    found = {INT8: figures(200, 0.8e9), Q8_0: figures(100, 0.9e9), LIBRARY: figures(140, 2e9)}
    lines = [str(goal) for goal in goals(found, shape="0.6B", is_whole=False)]
    assert lines == [
        f"tokens per second at 128 tokens, {INT8} / {Q8_0}: 2, at least 2: met",
        f"tokens per second at 128 tokens, {INT8} / {LIBRARY}: 1.43, at least 1.5: MISSED",
        f"peak memory, {INT8} / the smaller of the two: 0.889, at most 1.1: met",
    ]
    whole = [str(goal) for goal in goals({INT8: figures(1, 1e9)}, shape="0.6B", is_whole=True)]
    assert whole == [f"peak memory, {INT8}, bytes: 1e+09, at most 9e+08: MISSED"]


def test_no_goal_is_met_without_its_cases() -> None:
    assert list(goals({INT8: figures(1e9, 1)}, shape="4B", is_whole=True)) == []
    assert list(goals({}, shape="0.6B", is_whole=True)) == []


def test_embeddings_of_another_model_are_refused() -> None:
    found = {REFERENCE: {"embeddings": {"128": [1.0, 0.0]}}, Q8_0: {"embeddings": {"128": [0.99, 0.1]}}}
    least = least_cosines(found)
    assert least[Q8_0] == pytest.approx(0.9949, abs=1e-4)
    check_cosines(least)
    for wrong in ([0.9, 0.4], [-1.0, 0.0], [0.0, 0.0], [float("nan"), 0.0]):
        with pytest.raises(SystemExit, match=r"llama\.cpp Q8_0 runs another model"):
            check_cosines(least_cosines({**found, Q8_0: {"embeddings": {"128": wrong}}}))


@pytest.mark.nightly
def test_builds_and_programs_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    output = tmp_path / "found.jsonl"
    cases = ["build-no-verify", "int8", "session", "sentence-transformers"]
    arguments = ["large", "--layers", "1", "--lengths", "16", "--only", *cases]
    monkeypatch.setattr(sys, "argv", [*arguments, "--folder", str(tmp_path), "--output", str(output)])
    large.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    names = [name for name, each in EMBEDDERS.items() if each.environment is None]
    assert [row.get("embedder") for row in rows] == [None, None, *names]
    for row in rows:
        assert row["peak_bytes"] > 10**8
        assert row["checkpoint_bytes"] > 3 * 10**8
    for row in rows[2:]:
        assert row["run_s"]["16"]["median"] > 0
        assert row["min_cosine"] >= EMBEDDERS[row["embedder"]].min_cosine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["session"], "build it first"), (["llama"], "llama needs --llama PYTHON")],
)
def test_cases_without_what_they_need_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.setattr(sys, "argv", ["large", "--only", *arguments, "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        large.main()
    assert message in capsys.readouterr().err
