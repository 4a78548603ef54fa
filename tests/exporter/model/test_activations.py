"""The library's GELU of a tanh becomes one operator that computes the same; other activations stay."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from hdexport.model.activations import fuse_gelu
from support.comparators import assert_close

VALUES = torch.linspace(-8, 8, 4001)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_the_gelu_of_a_tanh_is_one_operator_that_computes_the_same(name: str) -> None:
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(ACT2FN[name])})
    expected = model["inner"](VALUES)
    fuse_gelu(model)
    assert type(model["inner"][0]) is torch.nn.GELU
    assert_close(model["inner"](VALUES).numpy(), expected.numpy(), atol=1e-6)
    # GELU by the normal distribution is another function.
    assert (torch.nn.functional.gelu(VALUES) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["gelu", "quick_gelu"])
def test_other_activations_stay_what_they_are(name: str) -> None:
    model = torch.nn.Sequential(ACT2FN[name])
    before = model[0]
    fuse_gelu(model)
    assert model[0] is before
