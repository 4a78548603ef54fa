"""--rope ntk:FACTOR: the base of rotary positions is multiplied where layers attend to the whole text."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from hdexport.checkpoint import find_checkpoint
from hdexport.model.rotary import stretch_rotary, use_stretched_rotary
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import ModelError
from support.answers import assert_answers, inputs_of
from support.commands import run_here
from support.grids import nightly_unless
from support.hugging_face import HuggingFace
from support.padded_batches import cases
from support.tiny_models import BASE, save_tiny_model

AROUND_BASE = (BASE - 1, BASE, BASE + 1, 2 * BASE)


def test_frequencies_of_global_layers_are_the_librarys_for_the_larger_base(tmp_path: Path) -> None:
    ours = save_tiny_model(tmp_path, "modernbert", Task.FEATURE_EXTRACTION)
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    stretch_rotary(ours, 4.0)
    use_stretched_rotary(theirs, 4.0)
    theta, size = before.config.rope_parameters["full_attention"]["rope_theta"], 8
    defined = (4.0 * theta) ** -(np.arange(0, size, 2) / size)
    assert torch.equal(ours.rotary_emb.full_attention_inv_freq, theirs.rotary_emb.full_attention_inv_freq)
    np.testing.assert_allclose(ours.rotary_emb.full_attention_inv_freq, defined, rtol=1e-6)
    for model in (ours, theirs):
        local = model.rotary_emb.sliding_attention_inv_freq
        assert torch.equal(local, before.rotary_emb.sliding_attention_inv_freq)


@pytest.mark.parametrize("model_type", ["modernbert", nightly_unless(False, "gte")])
def test_both_graphs_answer_as_a_checkpoint_with_that_base(tiny_bundles, tmp_path: Path, model_type: str) -> None:
    bundle = tiny_bundles(model_type, rope_factor=4.0)
    rope = copy.deepcopy(bundle.hugging_face.model.config.rope_parameters)
    rope.get("full_attention", rope)["rope_theta"] *= 4.0
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION, rope_parameters=rope)
    other = HuggingFace(tmp_path, "feature-extraction", max_len=300)
    for tokens, name, input_ids, attention_mask in cases(AROUND_BASE):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        assert_answers(bundle, feeds, other(**feeds), case=(f"{tokens} tokens", name))


@pytest.mark.parametrize(
    ("precision", "scale", "grid"),
    [("float32", "none", Grid.QUICK), nightly_unless(False, "float16", "logn", Grid.FULL)],
)
def test_bundles_are_verified(tiny_bundles, precision: str, scale: str, grid: Grid) -> None:
    bundle = tiny_bundles("modernbert", precision=precision, rope_factor=4.0, attention_scale=scale)
    opened = open_bundle(bundle.path)
    checkpoint = find_checkpoint(bundle.checkpoint)
    found = verify_bundle(opened, reference_of(opened, checkpoint), grid=grid)
    assert found.passed, "\n".join(found.summary())


@pytest.mark.parametrize("model_type", ["modernbert", nightly_unless(False, "gte")])
def test_verification_sees_another_factor(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type, rope_factor=4.0)
    for factor in (None, 3.0):
        positions = dataclasses.replace(bundle.manifest.positions, rope_factor=factor)
        wrong = Bundle(bundle.path, dataclasses.replace(bundle.manifest, positions=positions))
        found = verify_bundle(wrong, reference_of(wrong, find_checkpoint(bundle.checkpoint)), grid=Grid.QUICK)
        assert not found.passed, factor


def test_positions_that_are_scaled_already_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "modernbert", Task.FEATURE_EXTRACTION)
    model.config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelError, match=r"rope_type 'linear', which scales them already\.\nLeave it out\."):
        stretch_rotary(model, 4.0)


@pytest.mark.parametrize(
    ("model_type", "max_len", "said"),
    [
        ("bert", 300, "--rope ntk:4 is for rotary positions, and those of bert are learned.\nLeave it out;"),
        ("roformer", 300, "--rope ntk:4 cannot stretch the positions of roformer.\nLeave it out."),
        ("modernbert", BASE, "changes all answers, for texts longer than the 64 tokens of training; --max-len 64"),
    ],
)
def test_models_that_have_no_use_for_it_are_refused(tmp_path: Path, model_type: str, max_len: int, said: str) -> None:
    save_tiny_model(tmp_path / "model", model_type, Task.FEATURE_EXTRACTION)
    output = tmp_path / "bundle"
    refused = run_here("build", tmp_path / "model", "--max-len", max_len, "--rope", "ntk:4", "-o", output)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert not output.exists()


def test_a_value_of_another_form_is_refused() -> None:
    for value in ("ntk", "ntk:1", "ntk:nan", "yarn:4"):
        refused = run_here("build", "nothing", f"--rope={value}")
        assert refused.returncode == 1, value
        assert f"argument --rope: {value} is not ntk:FACTOR with a FACTOR above 1, such as ntk:4" in refused.stderr


def test_inspect_and_the_manifest_say_it(tiny_bundles) -> None:
    bundle = tiny_bundles("modernbert", rope_factor=4.0)
    assert bundle.manifest.positions.rope_factor == 4.0
    shown = run_here("inspect", bundle.path).stdout
    assert "computed, rotary base times 4 in layers that attend to the whole text" in shown
