"""What the CPU benchmarks share: processes, ratios, and verdicts that can be bad."""

from __future__ import annotations

import argparse
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cpu import openvino, targets
from benchmarks.cpu.targets import Figure, Target
from benchmarks.record import command_line

_FAKE_CASES = """
import json, sys
name = sys.argv[sys.argv.index("--case") + 1]
latency, answer = {"ours": (4.0, 1.0), "theirs": (10.0, 1.0 + float(sys.argv[-1]))}[name]
print("what a library says on its own")
print(json.dumps({"latency_ms": latency, "cpu_ms": 2 * latency, "growth_bytes": 1, "answer": [answer, 1.0]}))
"""


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module ``fake`` of the processes that a test starts; both of its cases answer, and the ratio is 0.4."""
    script = tmp_path / "fake.py"
    script.write_text(_FAKE_CASES)
    monkeypatch.chdir(tmp_path)
    return script


def compared(target: Target, *, difference: float = 0.0, is_alike: bool = False) -> dict[str, Any]:
    asked: dict[str, Any] = {"same_answers": {"ours": ("theirs", 1e-3)}}
    if is_alike:
        asked = {"same_answers": {}, "alike_answers": {"ours": ("theirs", 0.99)}}
    return targets.compare(
        "fake", cases=["ours", "theirs"], targets=[target], rounds=2, arguments=[str(difference)], **asked, tokens=7
    )


@pytest.mark.parametrize(
    ("against", "at_most", "status", "said"),
    [
        ("theirs", 0.39, 1, "ours / theirs, latency: 0.400 (0.400 to 0.400), target 0.39: MISSED"),
        (None, 4.0, 0, "  ours, latency: 4.000 (4.000 to 4.000), target 4: met"),
    ],
    ids=["missed ratio", "figure"],
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


def test_nothing_is_reported_after_an_answer_of_another_direction() -> None:
    with pytest.raises(SystemExit, match=r"ours gives a wrong answer: its cosine with that of theirs is 0\.9"):
        compared(Target("ours", "theirs", Figure.LATENCY, 1.0), difference=-0.5, is_alike=True)


def test_an_answer_of_the_same_direction_is_reported_with_its_cosine(capsys: pytest.CaptureFixture[str]) -> None:
    result = compared(Target("ours", "theirs", Figure.LATENCY, 1.0), difference=0.1, is_alike=True)
    assert result["cosines"] == {"ours": pytest.approx(2.1 / (2 * (1 + 1.1**2)) ** 0.5)}
    targets.report(result, None)
    assert "ours, cosine of its answer: 0.99" in capsys.readouterr().out


def test_a_case_that_ends_badly_is_named_and_ends_the_comparison(fake: Path) -> None:
    fake.write_text("raise SystemExit('the model is not here')")
    with pytest.raises(SystemExit, match=r"fake --case ours 0\.0: failed: .*the model is not here"):
        compared(Target("ours", None, Figure.LATENCY, 1.0))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@pytest.mark.nightly
def test_growth_is_that_of_the_run() -> None:
    def run(ids: np.ndarray) -> np.ndarray:
        """A megabyte a token, touched; of pages of its own, for the heap has some to give again after a warm-up."""
        pages = np.frombuffer(mmap.mmap(-1, ids.shape[1] << 20), np.float32).reshape(1, ids.shape[1], -1)
        pages.fill(1)
        return pages

    measured = targets.figures_of(run, np.zeros((1, 128), np.int64))
    assert 100e6 < measured["growth_bytes"] < 300e6
    assert measured["latency_ms"] > 0
    assert measured["cpu_ms"] > 0


def test_the_worst_text_of_a_model_that_answers_wrongly_misses_the_target() -> None:
    """The figure by which `benchmarks.cpu.openvino` judges bfloat16 and int8."""
    rows = {tokens: np.random.default_rng(tokens).normal(size=(1, tokens, 8)).astype(np.float32) for tokens in (3, 5)}
    texts = [np.zeros((1, tokens), np.int64) for tokens in rows]
    right = openvino.text_vectors(lambda ids: rows[ids.shape[1]], texts)
    assert right.shape == (2, 8)
    wrong = openvino.text_vectors(lambda ids: rows[ids.shape[1]] * (1 if ids.shape[1] == 3 else -1), texts)
    assert targets.cosines(right, right).min() == pytest.approx(1)
    assert targets.cosines(wrong, right).min() == pytest.approx(-1)


def test_cases_are_chosen_by_words_with_what_needs_no_other() -> None:
    all_cases: dict[str, Any] = {
        "cases": ["bundle 64", "openvino 64", "openvino 128"],
        "targets": [
            Target("openvino 64", "bundle 64", Figure.LATENCY, 1.0),
            Target("bundle 64", None, Figure.PEAK, 1.0),
        ],
        "same_answers": {"openvino 64": ("bundle 64", 1e-3)},
        "tokens": 7,
    }
    chosen = {
        words: targets.chosen(argparse.Namespace(cases=list(words) or None), all_cases)
        for words in ((), ("openvino",), ("64",), ("bundle",))
    }
    assert chosen[()] == all_cases
    assert chosen["openvino",] == {"cases": all_cases["cases"][1:], "targets": [], "same_answers": {}, "tokens": 7}
    assert chosen["64",] == all_cases | {"cases": all_cases["cases"][:2]}
    assert [target.figure for target in chosen["bundle",]["targets"]] == [Figure.PEAK]
    with pytest.raises(SystemExit, match=r"No case has one of the words open\. There are: bundle 64, openvino 64, "):
        targets.chosen(argparse.Namespace(cases=["open"]), all_cases)


@pytest.mark.parametrize("output", [[], ["--output", "/home/me/a b.jsonl"], ["--output=b.jsonl"], ["-o", "b"]])
def test_a_recorded_command_names_no_file_of_the_machine_that_measured(
    output: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["attention.py", "lsh", *output, "--cases", "bundle 64"])
    assert command_line("benchmarks.cpu.attention") == "python -m benchmarks.cpu.attention lsh --cases 'bundle 64'"
