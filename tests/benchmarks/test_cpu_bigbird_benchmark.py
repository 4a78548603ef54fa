"""The CPU benchmark of block-sparse attention: a tiny run of the whole script, and a peer that does not fit."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hdexport.bench.measure.processes import Outcome
from hdexport.bench.results.result import Status

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = ["--hidden-size", "64", "--layers", "1", "--block", "8", "--random", "1"]


@pytest.fixture
def cpu_bigbird(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_bigbird

    yield cpu_bigbird
    for name in ("targets", "cpu_bigbird"):
        sys.modules.pop(name, None)


def test_the_script_compares_the_bundle_and_says_when_hugging_face_does_not_fit(
    cpu_bigbird: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its child processes run in this one, which has PyTorch loaded, and whose memory says nothing about a case."""
    import targets

    def run_here(arguments: list[str], **_: Any) -> Outcome:
        printed = io.StringIO()
        with monkeypatch.context() as child, redirect_stdout(printed):
            child.setattr(sys, "argv", arguments)
            assert cpu_bigbird.main() == 0
        return Outcome(status=Status.OK, output=json.loads(printed.getvalue()), reason=None, peak_rss_bytes=0)

    def does_not_fit(arguments: list[str], **_: Any) -> Outcome:
        assert arguments[2] == "growth hugging-face 256"
        return Outcome(status=Status.OUT_OF_MEMORY, output=None, reason="It was ended.", peak_rss_bytes=3_000_000)

    results = tmp_path / "results.jsonl"
    command = ["cpu_bigbird.py", "--lengths", "64", "128", "256", "--rounds", "1", *SHAPE, "--output", str(results)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(targets, "run_process", run_here)
    monkeypatch.setattr(targets, "with_growth", lambda call: (call(), 2))
    monkeypatch.setattr(cpu_bigbird, "run_process", does_not_fit)
    status = cpu_bigbird.main()
    (result,) = map(json.loads, results.read_text().splitlines())
    compared = {f"{model} {tokens}" for model in ("bundle", "hugging-face") for tokens in (64, 128)}
    assert set(result["cases"]) == {*compared, "dense-sdpa 128", "bundle 256"}
    assert all(figures["latency_ms"] > 0 for figures in result["cases"].values())
    assert result["hugging_face_growth"] == {
        "tokens": 256,
        "status": "OOM",
        "peak_rss_bytes": 3_000_000,
        "reason": "It was ended.",
    }
    missed = sum(ratio["median"] > ratio["target"] for ratio in result["ratios"])
    printed = capsys.readouterr().out
    assert (printed.count(": MISSED"), printed.count(": met")) == (missed, 4 - missed)
    assert status == (missed > 0)
    assert "hugging-face 256, memory growth, run once: OOM, at 3 MB resident: It was ended." in printed


def test_growth_alone_is_that_of_the_long_text(
    cpu_bigbird: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts: list[int] = []

    def load(model: str, models: Path) -> Any:
        assert (model, models) == ("hugging-face", tmp_path)
        return lambda ids: texts.append(ids.shape[1]) or np.zeros(1, np.float32)

    monkeypatch.setattr(cpu_bigbird, "_load", load)
    monkeypatch.setattr(cpu_bigbird, "with_growth", lambda call: (call(), 7_000_000))
    monkeypatch.setattr(sys, "argv", ["x", "--case", "growth hugging-face 256", "--models", str(tmp_path), *SHAPE])
    assert cpu_bigbird.main() == 0
    assert json.loads(capsys.readouterr().out) == {"growth_bytes": 7_000_000}
    assert texts == [64, 256]
    assert cpu_bigbird._said({"status": "ok", "growth_bytes": 7_000_000}) == "7 MB"


def test_hugging_face_is_never_given_a_text_that_makes_it_dense(
    cpu_bigbird: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cpu_bigbird._sparse_tokens(64, 3) == 1024 > (5 + 2 * 3) * 64
    monkeypatch.setattr(sys, "argv", ["cpu_bigbird.py", "--lengths", "4096", "8192", "8500"])
    with pytest.raises(SystemExit):
        cpu_bigbird.main()
    assert "--lengths 4096 8192 8500: multiples of 1024 are needed here." in capsys.readouterr().err
