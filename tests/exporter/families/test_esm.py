"""ESM: masks make the other tokens larger, and those of padding do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hdexport.checkpoint import find_checkpoint
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.answers import ATOL, assert_answers, inputs_of
from support.comparators import assert_close
from support.tiny_models import VOCAB_SIZE, change_json, save_tiny_model

MASK = 0


def test_masks_in_a_text_count_and_those_in_padding_do_not(tiny_bundles) -> None:
    bundle = tiny_bundles("esm")
    input_ids = np.random.default_rng(2).integers(2, VOCAB_SIZE, (3, 65))
    attention_mask = (np.arange(65) < np.array([[65], [40], [7]])).astype(np.int64)
    plain = bundle.session(**inputs_of(bundle, input_ids, attention_mask))["last_hidden_state"]
    input_ids[:, [1, 5]] = input_ids[1, 20:30] = MASK
    feeds = inputs_of(bundle, input_ids, attention_mask)
    assert_answers(bundle, feeds, bundle.hugging_face(**feeds))
    masked = bundle.session(**feeds)["last_hidden_state"]
    assert np.abs(masked - plain)[attention_mask == 1].max() > 100 * ATOL
    # transformers counts them there.
    in_padding = np.where(attention_mask == 1, input_ids, MASK)
    other = bundle.session(**inputs_of(bundle, in_padding, attention_mask))["last_hidden_state"]
    assert_close(other[attention_mask == 1], masked[attention_mask == 1], atol=ATOL)


def test_a_text_of_masks_alone_has_an_answer(tiny_bundles) -> None:
    """transformers divides 0 by 0."""
    bundle = tiny_bundles("esm")
    feeds = inputs_of(bundle, np.full((1, 5), MASK), np.ones((1, 5), np.int64))
    assert np.isfinite(bundle.session(**feeds)["last_hidden_state"]).all()


def test_models_that_fold_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "esm", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", is_folding_model=True)
    with pytest.raises(ModelError, match=r"is_folding_model true.*\nChoose a checkpoint of the language model"):
        find_checkpoint(tmp_path)


def test_positions_of_another_kind_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "esm", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", position_embedding_type="relative_key")
    with pytest.raises(ModelError, match=r"'relative_key' positions.*\nChoose .* is absolute or rotary"):
        find_checkpoint(tmp_path)
