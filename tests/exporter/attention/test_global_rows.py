"""The rows of global tokens in half precision, against the definition in float64.

In float32 both ways of computing the rows answer as Hugging Face does, at any number and place of tokens:
test_longformer.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdexport.attention.window.global_rows import (
    attend_through_projections,
    attend_to_all,
)
from support.comparators import assert_close

BATCH, HEADS, HEAD_DIM, TOKENS, SLOTS = 3, 4, 8, 37, 5
HIDDEN = HEADS * HEAD_DIM

PADDING, LOCAL = 0, 1


@pytest.fixture
def kinds() -> torch.Tensor:
    """[3, 37], int32: a whole text, one with padding on the right, one with holes."""
    kinds = torch.full((BATCH, TOKENS), LOCAL, dtype=torch.int32)
    kinds[1, 20:] = PADDING
    kinds[2, ::3] = PADDING
    return kinds


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Projections:
    """K x + b and V x + c, in the forms that the two ways take."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.hidden = randn(BATCH, TOKENS, HIDDEN, seed=1, dtype=dtype)
        self.query = randn(BATCH, SLOTS, HEADS, HEAD_DIM, seed=2, dtype=dtype)
        self.k, self.v = (randn(HIDDEN, HIDDEN, seed=seed, dtype=dtype) / HIDDEN**0.5 for seed in (3, 4))
        # Biases far larger than the rest: were one lost or counted twice, nothing else would hide it.
        self.b, self.c = (10 * randn(HIDDEN, seed=seed, dtype=dtype) for seed in (5, 6))

    def direct(self, kinds: torch.Tensor) -> torch.Tensor:
        key, value = (
            torch.nn.functional.linear(self.hidden, weight, bias).view(BATCH, TOKENS, HEADS, HEAD_DIM)
            for weight, bias in ((self.k, self.b), (self.v, self.c))
        )
        return attend_to_all(self.query, key, value, kinds, scale=0.3)

    def through(self, kinds: torch.Tensor) -> torch.Tensor:
        return attend_through_projections(
            self.query,
            self.hidden,
            kinds,
            key_weight=self.k.view(HEADS, HEAD_DIM, HIDDEN),
            value_weight=self.v.view(HEADS, HEAD_DIM, HIDDEN).transpose(1, 2),
            value_bias=self.c.view(HEADS, 1, HEAD_DIM),
            scale=0.3,
        )


def by_definition(projections: Projections, kinds: torch.Tensor) -> np.ndarray:
    """Row by row, key by key, real tokens only, in float64."""
    hidden, query = projections.hidden.double().numpy(), projections.query.double().numpy()
    keys = hidden @ projections.k.double().numpy().T + projections.b.double().numpy()
    values = hidden @ projections.v.double().numpy().T + projections.c.double().numpy()
    out = np.empty(query.shape)
    for text, slot, head in np.ndindex(*query.shape[:3]):
        real = np.flatnonzero(kinds[text].numpy())
        part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        scores = keys[text, real, part] @ query[text, slot, head] * 0.3
        weights = np.exp(scores - scores.max())
        out[text, slot, head] = weights / weights.sum() @ values[text, real, part]
    return out


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_few_slots_and_many_give_the_definitions_answers(kinds: torch.Tensor, slots: int) -> None:
    """The softmax is of float32, whose rounding of values of about 20 is 2e-6."""
    projections = Projections(torch.float64)
    projections.query = randn(BATCH, slots, HEADS, HEAD_DIM, seed=7)
    assert_close(projections.direct(kinds).numpy(), by_definition(projections, kinds), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_moving_the_projections_costs_no_accuracy_in_half_precision(kinds: torch.Tensor, dtype: torch.dtype) -> None:
    projections = Projections(dtype)
    expected = by_definition(projections, kinds)
    error = {way: np.abs(getattr(projections, way)(kinds).double().numpy() - expected) for way in ("direct", "through")}
    assert error["through"].max() <= 2 * error["direct"].max()
    assert error["through"].mean() <= 1.5 * error["direct"].mean()


def test_the_softmax_is_float32_for_half_precision_scores() -> None:
    """In float16, 2000 equal weights are each rounded, and a sum of them is not 1."""
    kinds = torch.full((1, 3000), LOCAL, dtype=torch.int32)
    query, key = torch.zeros(1, 1, 1, 8, dtype=torch.float16), torch.zeros(1, 3000, 1, 8, dtype=torch.float16)
    value = torch.full((1, 3000, 1, 8), 100.0, dtype=torch.float16)
    got = attend_to_all(query, key, value, kinds, scale=1.0)
    assert_close(got.float().numpy(), np.full(got.shape, 100.0, np.float32), atol=0.1)
