"""--rope ntk:FACTOR: the base of rotary positions is multiplied where layers attend to the whole text."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import EuroBertConfig, Gemma3TextConfig, GteConfig, NeoMMEConfig
from transformers.models.eurobert.modeling_eurobert import EuroBertRotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gte.modeling_gte import GteRotaryEmbedding
from transformers.models.neomme.modeling_neomme import NeoMMERotaryEmbedding

from hdexport.checkpoint import find_checkpoint
from hdexport.model.rotary import RotaryTable, rotated, stretch_rotary, use_rotary_tables, use_stretched_rotary
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
    assert found.passed, found.failed


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
    with pytest.raises(ModelError, match=r"rope_type 'linear', which scales them already\.\nLeave rope_factor out\."):
        stretch_rotary(model, 4.0)


@pytest.mark.parametrize(
    ("model_type", "max_len", "said"),
    [
        ("bert", 300, "--rope ntk:4 is for rotary positions, and those of bert are learned.\nLeave it out;"),
        ("roformer", 300, "--rope ntk:4 cannot scale the positions of roformer.\nLeave --rope out."),
        ("modernbert", BASE, "changes all outputs, for texts longer than the 64 tokens of training; --max-len 64"),
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
        assert f"argument --rope: {value!r} is not ntk:FACTOR with a FACTOR above 1, such as ntk:4" in refused.stderr


def test_inspect_and_the_manifest_say_it(tiny_bundles) -> None:
    bundle = tiny_bundles("modernbert", rope_factor=4.0)
    assert bundle.manifest.positions.rope_factor == 4.0
    shown = run_here("inspect", bundle.path).stdout
    assert "computed, RoPE base times 4 in layers with full attention" in shown


KINDS = ("full_attention", "sliding_attention")
ROTARY = {
    "pairs half a head apart": (GteRotaryEmbedding, GteConfig(), (None,)),
    "scaled cosines": (
        EuroBertRotaryEmbedding,
        EuroBertConfig(rope_parameters={"rope_type": "yarn", "factor": 8.0, "rope_theta": 500.0}),
        (None,),
    ),
    "two kinds of layers": (Gemma3RotaryEmbedding, Gemma3TextConfig(), KINDS),
    "a part of each head": (NeoMMERotaryEmbedding, NeoMMEConfig(), KINDS),
}


class Neighbours(GteRotaryEmbedding):
    """Pairs of neighbours, as GPT-J and Cohere have them; no family has."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in super().forward(x, position_ids)
        )


def model_with(rotary: torch.nn.Module, positions: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.inner = torch.nn.Module()
    model.inner.rotary_emb = rotary
    model.config = SimpleNamespace(max_position_embeddings=positions)
    return model


@pytest.mark.parametrize(("rotary_class", "config", "kinds"), ROTARY.values(), ids=ROTARY)
def test_the_tables_are_the_library_s(rotary_class: type, config: object, kinds: tuple[str | None, ...]) -> None:
    theirs = rotary_class(config)
    model = model_with(rotary_class(config), 300)
    use_rotary_tables(model)
    hidden_states = torch.zeros(1, 300, 8, dtype=torch.float16)
    positions = torch.arange(300)[None]
    for kind in kinds:
        named = {} if kind is None else {"layer_type": kind}
        ours = model.inner.rotary_emb(hidden_states, positions, **named)
        for table, other in zip(ours, theirs(hidden_states.float(), positions, **named), strict=True):
            assert table.dtype == torch.float32
            # The library rounds an angle of 299 by 2**-16.
            torch.testing.assert_close(table, other, rtol=0, atol=2e-5)
            assert not torch.allclose(table[:, 1:], other[:, :-1], atol=1e-2)


def test_angles_are_rounded_as_the_library_rounds_them() -> None:
    theirs = GteRotaryEmbedding(GteConfig())
    places = torch.arange(30000)
    cosines, sines = RotaryTable(theirs.inv_freq, len(places))(len(places))
    for ours, expected in zip((cosines, sines), theirs(torch.zeros(1), places[None]), strict=True):
        torch.testing.assert_close(ours, expected[0, :, : ours.shape[1]], rtol=0, atol=2**-23)
    exact = places.double()[:, None] * theirs.inv_freq.double()
    assert (exact.cos() - cosines).abs().max() > 1e-4


def test_pairs_turn_as_complex_numbers() -> None:
    states = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(0))
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    cosines, sines = RotaryTable(frequencies, 40)(40)
    paired = torch.view_as_complex(states.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous().double())
    expected = (
        torch.view_as_real(paired * torch.complex(cosines.double(), sines.double())).transpose(-1, -2).flatten(-2)
    )
    of_head = cosines.repeat(1, 2), sines.repeat(1, 2)
    torch.testing.assert_close(rotated(states, *of_head), expected.float())
    assert rotated(states.half(), *of_head).dtype == torch.float16


@pytest.mark.parametrize("positions", [1, 300])
def test_a_text_longer_than_the_tables_fails(positions: int) -> None:
    model = model_with(GteRotaryEmbedding(GteConfig()), positions)
    use_rotary_tables(model)
    model.inner.rotary_emb(torch.zeros(1), torch.arange(positions)[None])
    with pytest.raises(RuntimeError, match=r"exceeds dimension size"):
        model.inner.rotary_emb(torch.zeros(1), torch.arange(max(positions, 2) + 1)[None])


def test_frequencies_by_length_and_unknown_layouts_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    with pytest.raises(ModelError, match=r"kind 'dynamic' change with the length of a text.*\n.*default, linear, yarn"):
        use_rotary_tables(model_with(GteRotaryEmbedding(GteConfig(rope_parameters=rope)), 300))
    with pytest.raises(ModelError, match=r"Neighbours lays out its cosines in a way that hdexport does not know"):
        use_rotary_tables(model_with(Neighbours(GteConfig()), 300))
