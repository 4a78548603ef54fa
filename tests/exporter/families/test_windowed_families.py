"""EmbeddingGemma, UltraBERT and NeoMME: lengths around their windows, their details, and what is refused.

Their tasks and other lengths are compared in test_families.py, OpenVINO's bfloat16 in test_openvino_bfloat16.py, and
their engines built in test_sparse_engine.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hdruntime
from hdexport.build import BuildOptions, build
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.answers import ATOL, assert_as_hugging_face, inputs_of
from support.attention_records import recorded
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.hugging_face import HuggingFace
from support.needs import needs_openvino
from support.padded_batches import cases
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, save_tiny_model
from support.traced import TracedModel

WINDOW = 8
"""Tokens that a local layer of the tiny models sees on each side."""

LENGTHS = (2, 7, 8, 9, 10, 16, 17, 18, 37, 131)
"""Around the window and its span, and primes."""

FAMILIES = ("embedding_gemma2_text", "gemma3_text", "neomme", "ultrabert")

each_family = pytest.mark.parametrize("model_type", FAMILIES)


@each_family
def test_lengths_around_the_window_answer_as_hugging_face(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    assert recorded(bundle.manifest, "window").layers == (WINDOW,)
    assert recorded(bundle.manifest, "dense").layers == 1
    assert_as_hugging_face(bundle, LENGTHS)


@needs_openvino
@pytest.mark.parametrize("model_type", [nightly_unless(name == "embedding_gemma2_text", name) for name in FAMILIES])
def test_openvino_answers_as_hugging_face(openvino_bundles, model_type: str) -> None:
    bundle = openvino_bundles(model_type)
    with hdruntime.load(bundle.path, "openvino", threads=1) as session:
        for tokens, name, ids, mask in cases((9, 17, 129), sizes=(3,)):
            got = session(**inputs_of(bundle, ids, mask))["last_hidden_state"][mask == 1]
            with named_case(tokens, name):
                assert_close(got, bundle.hugging_face(ids, mask)["last_hidden_state"][mask == 1], atol=ATOL)


def test_a_gemma_that_generates_text_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "gemma3_text", Task.FEATURE_EXTRACTION, use_bidirectional_attention=False)
    with pytest.raises(ModelError, match=r"earlier tokens only.*\n.*use_bidirectional_attention|use_bidirectional"):
        build(BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=64))
    assert not (tmp_path / "bundle").exists()


def test_neomme_of_several_windows_answers_as_hugging_face(traced_models) -> None:
    """Every second local layer of a checkpoint has a wider window."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    per_layer = {1: {"sliding_window": 20}, 2: {"sliding_window": None}}
    model = traced_models("neomme", layer_types=layers, num_hidden_layers=3, per_layer_config=per_layer)
    assert_as_hugging_face(model, (21, 41, 131))


def test_states_beyond_float16_are_right_in_float16(tmp_path: Path) -> None:
    """The first layer adds numbers of up to a million, as those of published checkpoints do."""
    checkpoint = tmp_path / "model"
    model = save_tiny_model(checkpoint, "gemma3_text", Task.FEATURE_EXTRACTION)
    with torch.no_grad():
        model.layers[0].post_feedforward_layernorm.weight.mul_(1e5)
    model.save_pretrained(checkpoint)
    options = {"output": tmp_path / "bundle", "max_len": 64, "precision": "float16", "verify": None}
    half = TracedModel(BuildOptions(model=checkpoint, **options))
    hugging_face = HuggingFace(checkpoint, "feature-extraction", max_len=64)
    ids = np.random.default_rng(3).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (2, 33))
    expected = hugging_face(ids, np.ones_like(ids))["last_hidden_state"]
    got = half.traced(input_ids=ids, attention_mask=np.ones_like(ids))["last_hidden_state"]
    cosines = (got * expected).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert cosines.min() > 0.999
