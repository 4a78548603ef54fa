"""The walk through all types of text models: what it tries, and that docs/models.md says what came of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from benchmarks.cpu.any_types import BUILT, HAS_A_FAMILY, recorded_types, text_types, tiny_config, tried
from hdexport.families import SUPPORTED_MODEL_TYPES
from support.pages import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_models.py"))
RECORDED = recorded_types(GENERATOR["TYPES"])
ENCODERS = [name for name, row in RECORDED.items() if row["kind"] == "encoder" and row["outcome"] != HAS_A_FAMILY]


def test_encoders_and_decoders_are_tried_and_families_are_not() -> None:
    kinds = text_types()
    assert (kinds["roc_bert"], kinds["qwen2"], kinds["markuplm"]) == ("encoder", "decoder", "other")
    assert {name for name in SUPPORTED_MODEL_TYPES if kinds.get(name, "encoder") != "encoder"} == set()
    assert tried("bert")["outcome"] == HAS_A_FAMILY
    assert "pegasus" not in kinds


def test_models_are_tiny_in_all_their_parts() -> None:
    config = tiny_config("qwen2")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 120)
    assert tiny_config("modernvbert").text_config.hidden_size == 64


def test_the_page_counts_what_was_built_and_says_why_the_others_were_not(tmp_path: Path) -> None:
    leak = "The answers of this yoso by its own code depend on more than the text: a text | differs."
    outcomes = [
        ("bert", "encoder", HAS_A_FAMILY, {}),
        ("bart", "encoder", "no tiny model: an error", {}),
        ("bart", "encoder", BUILT, {"dense": 2}),
        ("xlm", "encoder", BUILT, {"dense": 1, "traced": 1}),
        ("yoso", "encoder", leak, {}),
        ("rwkv", "decoder", "x " * 200, {}),
    ]
    rows = [
        {"model_type": name, "kind": kind, "outcome": outcome, "attention": attention, "transformers": "5.23.0"}
        for name, kind, outcome, attention in outcomes
    ]
    record = tmp_path / "types.jsonl"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = "\n".join(GENERATOR["tried_types"](record)).splitlines()
    assert "Of 4 encoders, 1 have a family and 2 more are built: 75%." in written
    assert "* With hdexport's dense attention: bart." in written
    assert "* With attention from their code: xlm." in written
    assert "Of 1 decoders, 0 are built: 0%." in written
    assert "| yoso | a text / differs |" in written
    assert max(len(line) for line in written if line.startswith("| rwkv")) < 200
    assert GENERATOR["tried_types"](tmp_path / "none") == []


@pytest.mark.nightly
def test_every_encoder_of_the_library_is_recorded() -> None:
    recorded = {name for name, row in RECORDED.items() if row["kind"] == "encoder"}
    assert {name for name, kind in text_types().items() if kind == "encoder"} <= recorded, (
        "run: python -m benchmarks.cpu.any_types --kind encoder --output benchmarks/results/any_types.jsonl"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_is_built_where_the_page_says_so(model_type: str) -> None:
    assert (tried(model_type)["outcome"] == BUILT) == (RECORDED[model_type]["outcome"] == BUILT)
