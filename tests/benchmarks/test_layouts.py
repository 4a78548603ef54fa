"""Layouts without a family are compared with their library from text, and a wrong answer shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.cpu import dense, layouts
from support.grids import nightly_unless

pytest.importorskip("sentence_transformers")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of few numbers."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    monkeypatch.setattr(layouts, "_SIZES", layouts._SIZES | sizes)


@pytest.mark.nightly
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_layout_answers_as_its_library(rehearse: Any, name: str) -> None:
    result, _ = rehearse(layouts, f"{name} --tokens 40 72 --texts 2")
    counts = [result["tokens"][name][tokens] for tokens in ("40", "72")]
    assert counts == pytest.approx([80, 144], abs=2), "of two texts, each about as long as was asked for"
    errors = {case: found["error"] for case, found in result["cases"].items()}
    assert set(errors) == {f"{name} {model} {tokens}" for model in layouts._MODELS for tokens in (40, 72)}
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.usefixtures("small")
def test_a_layout_s_wrong_answer_is_a_missed_target(rehearse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layouts._run

    def mixed_up(folder: Any, model: str, *others: Any) -> Any:
        run = right(folder, model, *others)
        return run if model != "openvino" else lambda texts: np.asarray(run(texts))[::-1]

    monkeypatch.setattr(layouts, "_run", mixed_up)
    _, printed = rehearse(layouts, "llama-embed --tokens 40 --texts 2")
    missed = [line for line in printed.out.splitlines() if ": MISSED" in line]
    assert any("llama-embed openvino 40, error" in line for line in missed), printed.out
    assert not any("onnxruntime 40, error" in line for line in missed)


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "dense"), nightly_unless(False, "flaubert", "traced")])
def test_memory_of_a_type_is_held_to_the_plain_export_s_where_attention_is_ours(
    rehearse: Any, model_type: str, kind: str
) -> None:
    result, _ = rehearse(dense, f"--tokens 64 --model-type {model_type}")
    assert [record["type"] for record in result["attention"]] == [kind]
    figures = [ratio["figure"] for ratio in result["ratios"]]
    assert figures == (["memory growth"] if kind == "dense" else [])
    assert set(result["cases"]) == {"torch-sdpa", "plain-export", "bundle-float32"}
