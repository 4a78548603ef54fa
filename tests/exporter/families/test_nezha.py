"""NEZHA answers as transformers 4 did, at any length, and holds its table of distances once."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hdexport.checkpoint import find_checkpoint
from hdexport.families.nezha.config import NezhaConfig
from hdexport.families.nezha.model import NezhaSelfAttention
from hdexport.model.tasks import Task
from hdruntime.errors import ModelError
from support.comparators import assert_close
from support.tiny_models import change_json, save_tiny_model

DATA = Path(__file__).parents[2] / "data" / "nezha"
LENGTHS = (1, 6, 7, 12, 13, 14, 40)


def expected(name: str, rows: int, tokens: int) -> np.ndarray:
    """An answer of transformers 4; see tests/data/nezha/make.py."""
    with np.load(DATA / "expected.npz") as stored:
        return stored[f"{name}_{rows}_{tokens}"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("task", [Task.FEATURE_EXTRACTION, Task.FILL_MASK])
def test_the_module_answers_as_transformers_4_did(task: Task, rows: int) -> None:
    model = find_checkpoint(DATA).load(task)
    assert worst_difference(model, task, rows) < 1e-5


def worst_difference(model: torch.nn.Module, task: Task, rows: int) -> float:
    name, output = ("logits", "logits") if task is Task.FILL_MASK else ("states", "last_hidden_state")
    worst = 0.0
    for tokens in LENGTHS:
        ids, types, mask = (torch.from_numpy(expected(part, rows, tokens)) for part in ("ids", "types", "mask"))
        with torch.inference_mode():
            found = model(ids, attention_mask=mask, token_type_ids=types)[output] * mask[..., None]
        worst = max(worst, float(np.abs(found.numpy() - expected(name, rows, tokens)).max()))
    return worst


@pytest.mark.parametrize("change", ["one distance off", "keys and queries swapped", "no rows for values"])
def test_wrong_distances_are_found(monkeypatch, change: str) -> None:
    model = find_checkpoint(DATA).load(Task.FEATURE_EXTRACTION)
    for layer in model.encoder.layer:
        rows = layer.attention.self.rows
        if change == "one distance off":
            rows.copy_(rows.roll(1, 0))
        elif change == "keys and queries swapped":
            rows.copy_(rows.flip(0))
    if change == "no rows for values":
        monkeypatch.setattr(torch.Tensor, "scatter_add", lambda *given: given[0])
    assert worst_difference(model, Task.FEATURE_EXTRACTION, 1) > 1e-2


@pytest.mark.parametrize("rows", [1, 3])
def test_bundles_answer_as_transformers_4_did(stored_bundles, rows: int) -> None:
    bundle = stored_bundles(DATA, "fill-mask", max_len=64)
    for tokens in LENGTHS:
        ids, types, mask = (expected(part, rows, tokens) for part in ("ids", "types", "mask"))
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        for run in (bundle.portable, bundle.session):
            found = run(**feeds)["logits"] * mask[..., None]
            assert_close(found, expected("logits", rows, tokens), atol=2e-5)


def test_a_graph_holds_the_table_of_distances_once(tiny_bundles) -> None:
    bundle = tiny_bundles("nezha", "feature-extraction")
    shapes = [tuple(value.shape) for value in bundle.graph.graph.initializers.values()]
    assert shapes.count((41, 8)) == 1
    assert not [shape for shape in shapes if len(shape) == 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_relative_position": 0}, "max_relative_position is 0; it must be 1 or more"),
        ({"hidden_size": 36, "num_attention_heads": 4}, "does not make 4 heads of an even size"),
    ],
)
def test_sizes_that_no_nezha_has_are_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    directory = shutil.copytree(DATA, tmp_path / "checkpoint")
    change_json(directory / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        find_checkpoint(directory).load(Task.FEATURE_EXTRACTION)


def test_attention_does_not_depend_on_the_length_that_it_was_trained_with(tmp_path: Path) -> None:
    config = NezhaConfig(hidden_size=8, num_attention_heads=1, max_relative_position=3, max_position_embeddings=4)
    attention, states = NezhaSelfAttention(config), torch.randn(1, 50, 8)
    with torch.inference_mode():
        assert attention(states, None)[0].shape == (1, 50, 8)
    save_tiny_model(tmp_path, "nezha", Task.FEATURE_EXTRACTION)
    assert find_checkpoint(tmp_path).usual_len == 512
