"""What the CPU benchmarks share: processes, ratios, and verdicts that can be bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cpu import targets
from benchmarks.cpu.targets import Figure, Target

_FAKE_CASES = """
import json, sys
name = sys.argv[sys.argv.index("--case") + 1]
latency, answer = {"ours": (4.0, 1.0), "theirs": (10.0, 1.0 + float(sys.argv[-1]))}[name]
print("what a library says on its own")
print(json.dumps({"latency_ms": latency, "cpu_ms": 2 * latency, "growth_bytes": 1, "answer": [answer]}))
"""


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module ``fake`` of the processes that a test starts; both of its cases answer, and the ratio is 0.4."""
    script = tmp_path / "fake.py"
    script.write_text(_FAKE_CASES)
    monkeypatch.chdir(tmp_path)
    return script


def compared(target: Target, *, difference: float = 0.0) -> dict[str, Any]:
    return targets.compare(
        "fake", cases=["ours", "theirs"], targets=[target], rounds=2, arguments=[str(difference)],
        same_answers={"ours": ("theirs", 1e-3)}, tokens=7,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("against", "at_most", "status", "said"),
    [
        ("theirs", 0.4, 0, "ours / theirs, latency: 0.400 (0.400 to 0.400), target 0.4: met"),
        ("theirs", 0.39, 1, "ours / theirs, latency: 0.400 (0.400 to 0.400), target 0.39: MISSED"),
        (None, 4.0, 0, "  ours, latency: 4.000 (4.000 to 4.000), target 4: met"),
        (None, 3.9, 1, "  ours, latency: 4.000 (4.000 to 4.000), target 3.9: MISSED"),
    ],
    ids=["ratio", "missed ratio", "figure", "missed figure"],
)
def test_a_missed_target_is_reported_and_is_the_exit_status(
    against: str | None, at_most: float, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(Target("ours", against, Figure.LATENCY, at_most))
    assert result["cases"]["ours"] == {"latency_ms": 4.0, "cpu_ms": 8.0, "growth_bytes": 1}
    assert result["tokens"] == 7
    assert targets.report(result, None) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("difference", [2e-3, float("nan")])
def test_nothing_is_reported_after_a_wrong_answer(difference: float) -> None:
    with pytest.raises(SystemExit, match=r"ours gives a wrong answer: it differs from theirs by (0\.002|nan)"):
        compared(Target("ours", "theirs", Figure.LATENCY, 1.0), difference=difference)


def test_a_case_that_ends_badly_is_named_and_ends_the_comparison(fake: Path) -> None:
    fake.write_text("raise SystemExit('the model is not here')")
    with pytest.raises(SystemExit, match=r"fake --case ours 0\.0: failed: .*the model is not here"):
        compared(Target("ours", None, Figure.LATENCY, 1.0))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
def test_growth_is_that_of_the_run() -> None:
    def run(ids: np.ndarray) -> np.ndarray:
        """A megabyte a token, touched."""
        return np.ones((1, ids.shape[1], 2**18), np.float32)

    measured = targets.figures_of(run, np.zeros((1, 128), np.int64))
    assert 100e6 < measured["growth_bytes"] < 300e6
    assert measured["latency_ms"] > 0
    assert measured["cpu_ms"] > 0
