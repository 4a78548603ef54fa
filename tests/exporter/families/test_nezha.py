"""NEZHA answers as transformers 4 did, at any length, and holds its table of distances once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hdexport.checkpoint import find_checkpoint
from hdruntime.bundle.manifest import Task
from support.comparators import assert_close

DATA = Path(__file__).parents[2] / "data" / "nezha"
LENGTHS = (1, 6, 7, 12, 13, 14, 40)


def expected(name: str, rows: int, tokens: int) -> np.ndarray:
    """An answer of transformers 4; see tests/data/nezha/make.py."""
    with np.load(DATA / "expected.npz") as stored:
        return stored[f"{name}_{rows}_{tokens}"]


@pytest.mark.parametrize("task", [Task.FEATURE_EXTRACTION, Task.FILL_MASK])
def test_the_module_answers_as_transformers_4_did(task: Task) -> None:
    model = find_checkpoint(DATA).load(task)
    assert max(worst_difference(model, task, rows) for rows in (1, 3)) < 1e-5


def worst_difference(model: torch.nn.Module, task: Task, rows: int) -> float:
    name, output = ("logits", "logits") if task is Task.FILL_MASK else ("states", "last_hidden_state")
    worst = 0.0
    for tokens in LENGTHS:
        ids, types, mask = (torch.from_numpy(expected(part, rows, tokens)) for part in ("ids", "types", "mask"))
        with torch.inference_mode():
            found = model(ids, attention_mask=mask, token_type_ids=types)[output] * mask[..., None]
        worst = max(worst, float(np.abs(found.numpy() - expected(name, rows, tokens)).max()))
    return worst


def test_wrong_distances_are_found() -> None:
    model = find_checkpoint(DATA).load(Task.FEATURE_EXTRACTION)
    for layer in model.encoder.layer:
        layer.attention.self.rows.copy_(layer.attention.self.rows.roll(1, 0))
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
