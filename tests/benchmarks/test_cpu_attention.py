"""The CPU benchmarks of attention: a tiny run of each whole script."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cpu import bigbird, dense, distances, ffn_chunk, longt5, operators, performer, reformer, window, xlnet
from benchmarks.cpu.models import openvino_cases
from hdexport.bench.measure.processes import Outcome
from hdexport.bench.results.result import Status
from support.needs import needs_rtx

SHAPE = "--hidden-size 64 --layers 1"
BLOCKS = f"{SHAPE} --block 8 --random 1"


@pytest.mark.nightly
@pytest.mark.usefixtures("tiny_sentence_model")
def test_dense_attention_is_measured_in_every_way(rehearse: Any) -> None:
    result, _ = rehearse(dense, "--tokens 150")
    assert set(result["cases"]) == set(dense.CASES)
    assert len(result["ratios"]) == 4


@pytest.mark.nightly
@pytest.mark.usefixtures("tiny_sentence_model")
def test_windows_are_measured_for_every_model_at_every_length(rehearse: Any) -> None:
    result, _ = rehearse(window, f"--tokens 64 128 256 {SHAPE} --window 8")
    models = ("bundle", "hugging-face", "dense-sdpa")
    through_openvino = openvino_cases(128, 256)
    compared = {f"{model} {tokens}" for model in models for tokens in (64, 128, 256)}
    sample = window.sample_cases(128)
    assert set(result["cases"]) == {*compared, *through_openvino, *sample}
    assert len(result["ratios"]) == 6 + len(through_openvino) + len(sample) - 2


@pytest.mark.nightly
def test_blocks_are_measured_and_it_is_reported_when_hugging_face_does_not_fit(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does_not_fit(arguments: list[str], **_: Any) -> Outcome:
        assert arguments[-2:] == ["--case", "growth hugging-face 256"]
        return Outcome(status=Status.OUT_OF_MEMORY, reason="It was ended.", peak_rss_bytes=3_000_000)

    monkeypatch.setattr(bigbird, "run_process", does_not_fit)
    result, printed = rehearse(bigbird, f"--lengths 64 128 256 {BLOCKS}")
    compared = {f"{model} {tokens}" for model in ("bundle", "hugging-face") for tokens in (64, 128)}
    through_openvino = openvino_cases(64, 128)
    assert set(result["cases"]) == {*compared, "dense-sdpa 128", "bundle 256", *through_openvino}
    growth = {"tokens": 256, "status": "OOM", "peak_rss_bytes": 3_000_000, "reason": "It was ended."}
    assert result["hugging_face_growth"] == growth
    assert len(result["ratios"]) == 4 + len(through_openvino)
    assert "hugging-face 256, memory growth, run once: OOM, at 3 MB resident: It was ended." in printed.out


@pytest.mark.nightly
def test_hashes_are_measured_for_every_model(rehearse: Any) -> None:
    result, _ = rehearse(reformer, "--lengths 64 128 256 --hidden-size 64 --heads 2 --layers 2 --chunk 8")
    compared = {f"{model} {tokens}" for model in ("bundle", "hugging-face") for tokens in (64, 256)}
    assert set(result["cases"]) == {*compared, "bundle 128"}
    assert len(result["ratios"]) == 5


@pytest.mark.nightly
def test_segments_are_measured_and_documents_are_streamed(rehearse: Any) -> None:
    result, _ = rehearse(xlnet, f"--segment 16 --memory 16 --documents 32 64 {SHAPE}")
    assert set(result["cases"]) == {"bundle", "hugging-face", "stream 32", "stream 64"}
    assert len(result["ratios"]) == 3


@pytest.mark.nightly
def test_features_are_measured_against_dense_attention(rehearse: Any) -> None:
    result, _ = rehearse(performer, f"--lengths 16 64 256 {SHAPE} --features 16")
    compared = {f"{model} {tokens}" for model in ("bundle", "dense-sdpa") for tokens in (16, 64)}
    assert set(result["cases"]) == {*compared, "bundle 256", "favor 16"}
    assert len(result["ratios"]) == 6


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["t5", "nezha"])
def test_distances_are_measured_for_every_model(rehearse: Any, architecture: str) -> None:
    result, _ = rehearse(distances, f"--architecture {architecture} --lengths 16 64 128 {SHAPE}")
    compared = {f"{model} {tokens}" for model in ("bundle", "hugging-face") for tokens in (16, 64)}
    assert set(result["cases"]) == {*compared, "bundle 128"}
    assert len(result["ratios"]) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["transient-global", "local"])
def test_sides_are_measured_at_both_lengths(rehearse: Any, attention: str) -> None:
    result, _ = rehearse(longt5, f"--attention {attention} --lengths 300 600 {SHAPE}")
    assert set(result["cases"]) == {
        f"{model} {tokens}" for model in ("bundle", "hugging-face") for tokens in (300, 600)
    }
    assert len(result["ratios"]) == 5


@pytest.mark.nightly
def test_operators_are_measured_in_openvino(rehearse: Any) -> None:
    shape = "--tokens 64 128 --hidden-size 64 --layers 1"
    result, _ = rehearse(operators, f"{shape} --only clipped-t5 lsh relative")
    through_openvino = openvino_cases(64, 128)
    in_float32 = [case for case in through_openvino if case.startswith("openvino ")]
    expected = {f"{name} bundle {tokens}" for name in ("clipped-t5", "lsh", "relative") for tokens in (64, 128)}
    expected |= {f"{name} {case}" for name in ("clipped-t5", "relative") for case in through_openvino}
    assert set(result["cases"]) == expected | {f"lsh {case}" for case in in_float32}
    assert len(result["ratios"]) == 2 * (len(result["cases"]) - 6)


@pytest.mark.nightly
@needs_rtx
def test_chunks_are_measured_and_what_engines_plan(rehearse: Any) -> None:
    result, _ = rehearse(ffn_chunk, "--tokens 64 128 --short 16 --chunk 48 --hidden-size 128 --layers 1")
    compared = {f"{bundle} {tokens}" for bundle in ("whole", "chunks") for tokens in (64, 128)}
    assert set(result["cases"]) == {*compared, "short"}
    assert len(result["ratios"]) == 4
    attentions = ("dense attention", "windows")
    assert set(result["engine_bytes"]) == {*attentions, *(f"{name}, networks cut out" for name in attentions)}
    for name in attentions:
        assert 0 < result["engine_bytes"][f"{name}, networks cut out"] <= result["engine_bytes"][name]
