"""The CPU benchmarks: a tiny run of the whole script, and verdicts that can be bad."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hdexport.bench.measure.processes import Outcome
from hdexport.bench.results.result import Status

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

_FAKE_CASES = """
import json, sys
name = sys.argv[sys.argv.index("--case") + 1]
latency, answer = {"ours": (4.0, 1.0), "theirs": (10.0, 1.0 + float(sys.argv[-1]))}[name]
print("what a library says on its own")
print(json.dumps({"latency_ms": latency, "cpu_ms": 2 * latency, "growth_bytes": 1, "answer": [answer]}))
"""


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("targets", "cpu_window"):
        sys.modules.pop(name, None)


@pytest.fixture
def targets() -> ModuleType:
    import targets

    return targets


@pytest.mark.nightly
def test_the_script_measures_every_model_at_every_length(
    targets: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its child processes run in this one, which has PyTorch loaded, and whose memory says nothing about a case."""
    import cpu_window

    def run_here(arguments: list[str], **_: Any) -> Outcome:
        printed = io.StringIO()
        with monkeypatch.context() as child, redirect_stdout(printed):
            child.setattr(sys, "argv", arguments)
            assert cpu_window.main() == 0
        return Outcome(status=Status.OK, output=json.loads(printed.getvalue()), reason=None, peak_rss_bytes=0)

    results = tmp_path / "results.jsonl"
    shape = ["--hidden-size", "64", "--layers", "1", "--window", "8"]
    command = ["cpu_window.py", "--tokens", "64", "128", "256", "--rounds", "1", *shape, "--output", str(results)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(targets, "run_process", run_here)
    monkeypatch.setattr(targets, "with_growth", lambda call: (call(), 2))
    status = cpu_window.main()
    (result,) = map(json.loads, results.read_text().splitlines())
    models = ("bundle", "hugging-face", "dense-sdpa")
    assert set(result["cases"]) == {f"{model} {tokens}" for model in models for tokens in (64, 128, 256)}
    assert all(figures["latency_ms"] > 0 for figures in result["cases"].values())
    assert set(result["versions"]) == {"hdexport", "torch", "transformers", "onnxruntime"}
    missed = sum(ratio["median"] > ratio["target"] for ratio in result["ratios"])
    printed = capsys.readouterr().out
    assert len(result["ratios"]) == 6
    assert printed.count(": MISSED") == missed
    assert printed.count(": met") == 6 - missed
    assert status == (missed > 0)


def compare_fakes(targets: ModuleType, folder: Path, at_most: float, *, difference: float = 0.0) -> dict[str, Any]:
    """Both answer, in processes of their own; the ratio is 0.4."""
    script = folder / "fake.py"
    script.write_text(_FAKE_CASES)
    target = targets.Target("ours", "theirs", targets.Figure.LATENCY, at_most)
    return targets.compare(
        str(script),
        ["ours", "theirs"],
        [target],
        rounds=2,
        arguments=[str(difference)],
        same_answers={"ours": ("theirs", 1e-3)},
        tokens=7,
    )


@pytest.mark.parametrize(("at_most", "status", "verdict"), [(0.4, 0, "met"), (0.39, 1, "MISSED")])
def test_a_missed_target_is_said_and_is_the_exit_status(
    at_most: float, status: int, verdict: str, targets: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compare_fakes(targets, tmp_path, at_most)
    assert result["cases"]["ours"] == {"latency_ms": 4.0, "cpu_ms": 8.0, "growth_bytes": 1}
    assert result["tokens"] == 7
    assert targets.report(result, None) == status
    assert f"ours / theirs, latency: 0.400 (0.400 to 0.400), target {at_most}: {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize("difference", [2e-3, float("nan")])
def test_nothing_is_reported_after_a_wrong_answer(difference: float, targets: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"ours gives a wrong answer: it differs from theirs by (0\.002|nan)"):
        compare_fakes(targets, tmp_path, 1.0, difference=difference)


def test_a_case_that_ends_badly_is_named_and_ends_the_comparison(targets: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text("raise SystemExit('the model is not here')")
    with pytest.raises(SystemExit, match=r"fake\.py --case ours: failed: .*the model is not here"):
        targets.compare(str(script), ["ours"], [], rounds=1, arguments=[], same_answers={})


def test_nothing_is_compared_where_growth_cannot_be_had(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "with_growth", lambda call: (call(), None))
    with pytest.raises(SystemExit, match="Run it on Linux"):
        targets.compare("fake.py", ["ours"], [], rounds=1, arguments=[], same_answers={})


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
def test_growth_is_that_of_the_run(targets: ModuleType) -> None:
    import numpy as np

    def run(ids: np.ndarray) -> np.ndarray:
        """A megabyte a token, touched."""
        return np.ones((1, ids.shape[1], 2**18), np.float32)

    measured = targets.figures_of(run, np.zeros((1, 128), np.int64))
    assert 100e6 < measured["growth_bytes"] < 300e6
    assert measured["latency_ms"] > 0
    assert measured["cpu_ms"] > 0
