"""The CPU benchmarks of attention: at night, a tiny run of each whole script measures every case that it has."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from benchmarks.cpu import bigbird, dense, distances, ffn_chunk, longt5, operators, performer, reformer, window, xlnet
from benchmarks.cpu.models import openvino_cases
from hdexport.bench.measure.processes import Outcome
from hdexport.bench.results.result import Status
from support.needs import needs_rtx

pytestmark = pytest.mark.nightly

SHAPE = "--hidden-size 64 --layers 1"


def cases_of(models: str, *lengths: int) -> set[str]:
    return {f"{model} {tokens}" for model in models.split() for tokens in lengths}


BOTH = "bundle hugging-face"
CASES: dict[str, tuple[ModuleType, str, set[str], int]] = {
    "hashes": (
        reformer, "--lengths 64 128 256 --hidden-size 64 --heads 2 --layers 2 --chunk 8",
        cases_of(BOTH, 64, 256) | {"bundle 128"}, 5,
    ),
    "segments": (
        xlnet, f"--segment 16 --memory 16 --documents 32 64 {SHAPE}",
        {"bundle", "hugging-face", "stream 32", "stream 64"}, 3,
    ),
    "features": (
        performer, f"--lengths 16 64 256 {SHAPE} --features 16",
        cases_of("bundle dense-sdpa", 16, 64) | {"bundle 256", "favor 16"}, 6,
    ),
    **{
        f"distances of {name}": (
            distances, f"--architecture {name} --lengths 16 64 128 {SHAPE}",
            cases_of(BOTH, 16, 64) | {"bundle 128"}, 4,
        )
        for name in ("t5", "nezha")
    },
    **{
        f"{name} of longt5": (
            longt5, f"--attention {name} --lengths 300 600 {SHAPE}", cases_of(BOTH, 300, 600), 5,
        )
        for name in ("transient-global", "local")
    },
}  # fmt: skip
"""Name -> a script, its options, the cases that are measured, and how many ratios are reported."""


@pytest.mark.parametrize(("script", "options", "cases", "ratios"), CASES.values(), ids=CASES)
def test_every_case_is_measured(rehearse: Any, script: ModuleType, options: str, cases: set[str], ratios: int) -> None:
    result, _ = rehearse(script, options)
    assert (set(result["cases"]), len(result["ratios"])) == (cases, ratios)


@pytest.mark.usefixtures("tiny_sentence_model")
def test_dense_attention_and_windows_are_measured_in_every_way(rehearse: Any) -> None:
    result, _ = rehearse(dense, "--tokens 150")
    assert (set(result["cases"]), len(result["ratios"])) == (set(dense.CASES), 4)
    result, _ = rehearse(window, f"--tokens 64 128 256 {SHAPE} --window 8")
    compared = cases_of("bundle hugging-face dense-sdpa", 64, 128, 256)
    assert set(result["cases"]) == {*compared, *openvino_cases(128, 256), *window.sample_cases(128)}


def test_blocks_are_measured_and_it_is_reported_when_hugging_face_does_not_fit(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does_not_fit(arguments: list[str], **_: Any) -> Outcome:
        assert arguments[-2:] == ["--case", "growth hugging-face 256"]
        return Outcome(status=Status.OUT_OF_MEMORY, reason="It was ended.", peak_rss_bytes=3_000_000)

    monkeypatch.setattr(bigbird, "run_process", does_not_fit)
    result, printed = rehearse(bigbird, f"--lengths 64 128 256 {SHAPE} --block 8 --random 1")
    compared = cases_of(BOTH, 64, 128)
    assert set(result["cases"]) == {*compared, "dense-sdpa 128", "bundle 256", *openvino_cases(64, 128)}
    growth = {"tokens": 256, "status": "OOM", "peak_rss_bytes": 3_000_000, "reason": "It was ended."}
    assert result["hugging_face_growth"] == growth
    assert "hugging-face 256, memory growth, run once: OOM, at 3 MB resident: It was ended." in printed.out


def test_operators_are_measured_in_openvino(rehearse: Any) -> None:
    result, _ = rehearse(operators, "--tokens 64 128 --hidden-size 64 --layers 1 --only clipped-t5 lsh relative")
    through_openvino = openvino_cases(64, 128)
    in_float32 = [case for case in through_openvino if case.startswith("openvino ")]
    expected = {f"{name} bundle {tokens}" for name in ("clipped-t5", "lsh", "relative") for tokens in (64, 128)}
    expected |= {f"{name} {case}" for name in ("clipped-t5", "relative") for case in through_openvino}
    assert set(result["cases"]) == expected | {f"lsh {case}" for case in in_float32}


@needs_rtx
def test_chunks_are_measured_and_what_engines_plan(rehearse: Any) -> None:
    result, _ = rehearse(ffn_chunk, "--tokens 64 128 --short 16 --chunk 48 --hidden-size 128 --layers 1")
    assert set(result["cases"]) == cases_of("whole chunks", 64, 128) | {"short"}
    for name in ("dense attention", "windows"):
        assert 0 < result["engine_bytes"][f"{name}, networks cut out"] <= result["engine_bytes"][name]
