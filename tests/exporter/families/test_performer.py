"""Performers answer as lucidrains' performer-pytorch did."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hdexport.attention.registry import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.trust import Trust
from hdexport.extend import ExtendOptions, extend
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ModelError
from support.comparators import assert_close, named_case
from support.grids import nightly_unless

DATA = Path(__file__).parents[2] / "data" / "performer"
VARIANTS = ("plain", "biases", "rotary")
ATOL = 1e-5
"""Measured 4.9e-6; values reach 3.5, logits 10."""


@functools.cache
def expected_answers(variant: str) -> dict[str, np.ndarray]:
    with np.load(DATA / variant / "expected.npz") as file:
        return dict(file)


def loaded(variant: str, task: Task) -> Any:
    return find_checkpoint(DATA / variant, trust=Trust(allow_pickle=True)).load(task)


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("compat", [False, True])
def test_pytorch_answers_as_the_library_did(variant: str, compat: bool) -> None:
    expected = expected_answers(variant)
    ids, mask = (torch.from_numpy(expected[name]) for name in ("ids", "mask"))
    encoder, head = loaded(variant, Task.FEATURE_EXTRACTION), loaded(variant, Task.FILL_MASK)
    encoder.compat = head.compat = compat
    assert_close(encoder(ids).last_hidden_state.numpy(), expected["states"], atol=ATOL)
    assert_close(head(ids).logits.numpy(), expected["logits"], atol=ATOL)
    masked = encoder(ids, attention_mask=mask).last_hidden_state.numpy()
    if compat:
        assert_close(masked, expected["masked_states"], atol=ATOL)
        return
    # Padding changes nothing, and in the library's answers it does.
    for row, tokens in enumerate(mask.sum(1).tolist()):
        alone = encoder(ids[row : row + 1, :tokens]).last_hidden_state.numpy()
        assert_close(masked[row, :tokens], alone[0], atol=ATOL)
    assert np.abs(masked - expected["masked_states"])[mask.numpy() == 1].max() > 0.1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):
    """Bundles of (variant, mode) that fill masks, for as many tokens as the checkpoint has positions, or for 300."""

    @functools.cache
    def make(variant: str, compat: bool) -> Path:
        path = tmp_path_factory.mktemp("performer") / "bundle"
        spec = "favor:compat" if compat else None
        options = BuildOptions(
            model=DATA / variant,
            output=path,
            max_len=300 if variant == "rotary" else 24,
            task=Task.FILL_MASK,
            attention=attention_from_spec(spec),
            trust=Trust(allow_pickle=True),
            verify=None,
        )
        build(options)
        return path

    return make


@pytest.mark.parametrize(
    ("variant", "compat"), [("biases", False), ("rotary", True), nightly_unless(False, "plain", False)]
)
def test_bundles_answer_as_the_library_did(built, variant: str, compat: bool) -> None:
    """Either mode in either graph. Padding changes what the library answers, and in its mode what a bundle does."""
    import onnxruntime

    expected, path = expected_answers(variant), built(variant, compat)
    ids, mask = expected["ids"], expected["mask"]
    head = loaded(variant, Task.FILL_MASK)
    head.compat = compat
    with torch.inference_mode():
        whole, padded = (
            head(torch.from_numpy(ids), attention_mask=given).logits.numpy() for given in (None, torch.from_numpy(mask))
        )
    assert np.abs(whole - padded)[mask == 1].max() > 0.01
    for graph in ("model.onnx", "onnxruntime_cpu.onnx"):
        session = onnxruntime.InferenceSession(path / graph)
        (logits,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(mask)})
        (masked,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
        with named_case(graph):
            assert_close(logits, expected["logits"], atol=ATOL)
        with named_case(graph, "with padding"):
            assert_close(masked[mask == 1], padded[mask == 1], atol=ATOL)


@pytest.mark.parametrize(("variant", "compat"), [("biases", False), ("rotary", True)])
def test_bundles_are_verified(built, variant: str, compat: bool) -> None:
    opened = open_bundle(built(variant, compat))
    found = verify_bundle(opened, reference_of(opened, find_checkpoint(DATA / variant)), grid=Grid.QUICK)
    assert found.passed, found.failed


def test_verification_finds_another_mode(built) -> None:
    opened = open_bundle(built("biases", False))
    reference = reference_of(opened, find_checkpoint(DATA / "biases"))
    for module in reference._module.modules():
        if hasattr(module, "projection_matrix"):
            module.projection_matrix = module.projection_matrix.roll(1, dims=1)
    assert not verify_bundle(opened, reference, grid=Grid.QUICK).passed


def test_positions_are_extended(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(DATA / "biases", tmp_path / "performer")
    extend(ExtendOptions(model=checkpoint, output=tmp_path / "longer", max_len=100))
    model: Any = find_checkpoint(tmp_path / "longer").load(Task.FEATURE_EXTRACTION)
    assert model.pos_emb.emb.weight.shape == (100, 16)
    stored = load_file(checkpoint / "model.safetensors")["pos_emb.emb.weight"]
    assert torch.equal(model.pos_emb.emb.weight[:24], stored)
    assert model.config.max_seq_len == 100


def changed(tmp_path: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in config.json."""
    checkpoint = shutil.copytree(DATA / "biases", tmp_path / "performer")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    return checkpoint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axial_position_emb": True}, "axial_position_emb is true: axial positions"),
        ({"causal": True}, "causal is true: a causal Performer"),
        ({"local_attn_heads": 1}, "local_attn_heads is 1; 0 is supported"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"(?s)config.json does not describe a performer: .*{message}"):
        find_checkpoint(changed(tmp_path, **changes)).load(Task.FEATURE_EXTRACTION)


def test_positions_that_turn_are_computed_for_any_length(built, tmp_path: Path) -> None:
    """PerformerLM's are rotary where nothing is said; nothing is extended, and --attention finds no table."""
    positions = open_bundle(built("rotary", True)).manifest.positions
    assert (positions.form, positions.base, positions.rows) == ("computed", 24, 300)
    for other in ("plain", "rotary"):
        assert find_checkpoint(DATA / other).family.learned_positions is (other == "plain")
    with pytest.raises(ModelError, match="performer"):
        extend(ExtendOptions(model=DATA / "rotary", output=tmp_path / "longer", max_len=100))
    assert not (tmp_path / "longer").exists()


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    name = "performer.net.layers.1.0.fn.fast_attention.projection_matrix"
    checkpoint = changed(tmp_path)
    weights = load_file(checkpoint / "model.safetensors")
    del weights[name]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has no weights for {name}"):
        find_checkpoint(checkpoint).load(Task.FILL_MASK)


def test_the_task_is_that_of_the_head(tmp_path: Path) -> None:
    assert find_checkpoint(DATA / "plain").task() is Task.FILL_MASK
    with pytest.raises(ModelError, match="text-classification of a performer is not supported"):
        loaded("biases", Task.TEXT_CLASSIFICATION)
