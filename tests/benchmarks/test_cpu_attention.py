"""The CPU benchmarks of attention: at night, a tiny run of each whole script measures every case that it has."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cpu import attention, dense, ffn_chunk, xlnet
from benchmarks.cpu.attention import DENSE, KINDS, cases, targets
from hdexport.attention.registry import attention_types
from support.needs import needs_rtx


def test_every_kind_of_attention_has_a_model_here() -> None:
    measured = [name.replace("-", "_") for name in KINDS]
    for kind in attention_types():
        assert any(name.startswith(kind.name) for name in measured), kind.name


@pytest.mark.parametrize("name", KINDS)
def test_all_that_a_target_divides_is_measured(name: str) -> None:
    lengths = [512, 2048, 4096]
    measured = {*cases(name, lengths), *cases(DENSE, lengths)}
    asked = targets(name, lengths)
    assert {case for target in asked for case in (target.case, target.against)} <= measured
    (growth,) = [
        target.at_most for target in asked if target.against == f"{name} bundle 2048" and "4096" in target.case
    ]
    assert growth == pytest.approx(2.2), "a quadratic part would make it 4"


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_measured_in_every_way(rehearse: Any, name: str) -> None:
    kinds = [name, DENSE] if KINDS[name].is_linear else [name]
    result, _ = rehearse(attention, f"{' '.join(kinds)} --tokens 64 1100")
    assert set(result["cases"]) == {case for kind in kinds for case in cases(kind, [64, 1100])}
    assert len(result["ratios"]) == sum(len(targets(kind, [64, 1100])) for kind in kinds)


@pytest.mark.nightly
def test_segments_are_measured_and_documents(rehearse: Any) -> None:
    result, _ = rehearse(xlnet, "--segment 16 --memory 16 --documents 32 64 --layers 1")
    assert set(result["cases"]) == {"bundle", "hugging-face", "stream 32", "stream 64"}
    assert len(result["ratios"]) == 3


@pytest.mark.nightly
@pytest.mark.usefixtures("tiny_sentence_model")
def test_dense_attention_is_measured_in_every_way(rehearse: Any) -> None:
    result, _ = rehearse(dense, "--tokens 150")
    assert (set(result["cases"]), len(result["ratios"])) == (set(dense.CASES), 4)


@pytest.mark.nightly
@needs_rtx
def test_chunks_are_measured_and_what_engines_plan(rehearse: Any) -> None:
    result, _ = rehearse(ffn_chunk, "--tokens 64 128 --short 16 --chunk 48 --layers 1")
    assert set(result["cases"]) == {
        "short",
        *(f"{bundle} {tokens}" for tokens in (64, 128) for bundle in ("whole", "chunks")),
    }
    for name in ("dense attention", "windows"):
        assert 0 < result["engine_bytes"][f"{name}, networks cut out"] <= result["engine_bytes"][name]
