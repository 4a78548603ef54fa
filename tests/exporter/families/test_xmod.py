"""X-MOD: a bundle has the network of one language, by its option or the checkpoint's own choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hdexport.build import BuildOptions
from hdexport.checkpoint import find_checkpoint
from hdexport.families import family_of
from hdruntime.bundle.manifest import Task
from hdruntime.errors import InputError, ModelError
from support.answers import ATOL
from support.comparators import assert_close
from support.tiny_models import change_json, save_tiny_model
from support.traced import TracedModel


def test_an_option_chooses_the_language(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    save_tiny_model(checkpoint, "xmod", Task.FEATURE_EXTRACTION)
    model = TracedModel(BuildOptions(model=checkpoint, output=tmp_path / "bundle", max_len=64, adapter="de-DE"))
    ids = np.random.default_rng(0).integers(2, 100, (1, 17))
    got = model.traced(input_ids=ids, attention_mask=np.ones_like(ids))["last_hidden_state"]
    answers = {}
    original = transformers.AutoModel.from_pretrained(checkpoint).eval()
    for language in ("de_DE", "en_XX"):
        original.set_default_language(language)
        with torch.inference_mode():
            answers[language] = original(torch.from_numpy(ids)).last_hidden_state.numpy()
    assert_close(got, answers["de_DE"], atol=ATOL)
    assert np.abs(got - answers["en_XX"]).max() > 100 * ATOL


def test_another_language_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "xmod", Task.FEATURE_EXTRACTION)
    with pytest.raises(InputError, match=r"(?s)adapter='fr_XX' is not among .*Choose from: de_DE, en_XX"):
        find_checkpoint(tmp_path).with_adapter("fr_XX")


def test_several_languages_without_a_choice_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "xmod", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", default_language=None)
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    with pytest.raises(ModelError, match=r"default_language None.* de_DE, en_XX.*\n.*adapter='de_DE'"):
        family_of("xmod").prepare(model)
    chosen = find_checkpoint(tmp_path).with_adapter("en_XX").load(Task.FEATURE_EXTRACTION)
    family_of("xmod").prepare(chosen)
    assert chosen.config.default_language == "en_XX"


def test_the_only_language_is_chosen(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "xmod", Task.FEATURE_EXTRACTION, languages=["en_XX"], default_language=None)
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    family_of("xmod").prepare(model)
    assert model.config.default_language == "en_XX"
