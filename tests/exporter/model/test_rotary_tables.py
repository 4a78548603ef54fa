"""Rotary positions from tables answer as the library's own, for every kind of layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import EuroBertConfig, Gemma3TextConfig, GteConfig, NeoMMEConfig
from transformers.models.eurobert.modeling_eurobert import EuroBertRotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gte.modeling_gte import GteRotaryEmbedding
from transformers.models.neomme.modeling_neomme import NeoMMERotaryEmbedding

from hdexport.model.rotary_tables import RotaryTable, turned, use_rotary_tables
from hdruntime.errors import ModelError

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
    torch.testing.assert_close(turned(states, *of_head), expected.float())
    assert turned(states.half(), *of_head).dtype == torch.float16


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
