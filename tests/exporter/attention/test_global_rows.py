"""The rows of global tokens: found, computed either way, written back; against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdexport.attention.window.global_rows import (
    absorbs_projections,
    attend_through_projections,
    attend_to_all,
    find_global_rows,
    overwrite_rows,
)
from support.comparators import assert_close

BATCH, HEADS, HEAD_DIM, TOKENS, SLOTS = 3, 4, 8, 37, 5
HIDDEN = HEADS * HEAD_DIM

PADDING, LOCAL, GLOBAL = 0, 1, 2


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

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.hidden = randn(BATCH, TOKENS, HIDDEN, seed=1, dtype=dtype)
        self.query = randn(BATCH, HEADS, SLOTS, HEAD_DIM, seed=2, dtype=dtype)
        self.k, self.v = (randn(HIDDEN, HIDDEN, seed=seed, dtype=dtype) / HIDDEN**0.5 for seed in (3, 4))
        # Biases far larger than the rest: were one lost or counted twice, nothing else would hide it.
        self.b, self.c = (10 * randn(HIDDEN, seed=seed, dtype=dtype) for seed in (5, 6))

    def direct(self, kinds: torch.Tensor) -> torch.Tensor:
        key, value = (
            torch.nn.functional.linear(self.hidden, weight, bias).view(BATCH, TOKENS, HEADS, HEAD_DIM).transpose(1, 2)
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
    for text, head, slot in np.ndindex(*query.shape[:3]):
        real = np.flatnonzero(kinds[text].numpy())
        part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        scores = keys[text, real, part] @ query[text, head, slot] * 0.3
        weights = np.exp(scores - scores.max())
        out[text, head, slot] = weights / weights.sum() @ values[text, real, part]
    return out


# The softmax is float32 whatever the inputs are.
@pytest.mark.parametrize("way", ["direct", "through"])
def test_both_ways_are_attention_over_all_real_tokens(kinds: torch.Tensor, way: str) -> None:
    projections = Projections()
    got = getattr(projections, way)(kinds)
    assert_close(got.numpy(), by_definition(projections, kinds), atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_moving_the_projections_costs_no_accuracy_in_half_precision(kinds: torch.Tensor, dtype: torch.dtype) -> None:
    projections = Projections(dtype)
    expected = by_definition(projections, kinds)
    error = {way: np.abs(getattr(projections, way)(kinds).double().numpy() - expected) for way in ("direct", "through")}
    assert error["through"].max() <= 2 * error["direct"].max()
    assert error["through"].mean() <= 1.5 * error["direct"].mean()


def test_the_softmax_is_float32_for_half_precision_scores(kinds: torch.Tensor) -> None:
    """In float16, 2000 equal weights are each rounded, and a sum of them is not 1."""
    kinds = torch.full((1, 3000), LOCAL, dtype=torch.int32)
    query, key = torch.zeros(1, 1, 1, 8, dtype=torch.float16), torch.zeros(1, 1, 3000, 8, dtype=torch.float16)
    value = torch.full((1, 1, 3000, 8), 100.0, dtype=torch.float16)
    got = attend_to_all(query, key, value, kinds, scale=1.0)
    assert_close(got.float().numpy(), np.full(got.shape, 100.0, np.float32), atol=0.1)


def test_padding_weighs_nothing_whatever_its_score(kinds: torch.Tensor) -> None:
    projections = Projections()
    expected = projections.through(kinds)
    projections.hidden[kinds == PADDING] = 1e4
    assert_close(projections.through(kinds).numpy(), expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("marked", [(), (0,), (36,), (4, 5, 30), (0, 9, 18, 27, 36)], ids=str)
def test_every_global_token_has_a_slot_and_no_other_row_is_written(marked: tuple[int, ...]) -> None:
    kinds = torch.full((2, TOKENS), LOCAL, dtype=torch.int32)
    kinds[0, list(marked)] = GLOBAL
    kinds[1, 7] = GLOBAL
    found = find_global_rows(kinds, SLOTS)
    merged = randn(2, TOKENS, HEADS, HEAD_DIM)
    rows = merged.gather(1, found.index[:, :, None, None].expand(-1, -1, HEADS, HEAD_DIM)) + 1000
    written = overwrite_rows(merged, rows, found)
    # Slots of a text without global tokens refer to a row that they must not change.
    expected = merged + 1000 * (kinds == GLOBAL)[:, :, None, None]
    assert torch.equal(written, expected)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_text_may_be_shorter_than_the_bound(tokens: int) -> None:
    kinds = torch.full((1, tokens), GLOBAL, dtype=torch.int32)
    found = find_global_rows(kinds, SLOTS)
    assert set(found.index[0].tolist()) == set(range(tokens))
    hidden = randn(1, tokens, HIDDEN)
    assert torch.equal(found.of_tokens(hidden), hidden[:, found.index[0]])
    heads = randn(1, HEADS, tokens, HEAD_DIM)
    assert torch.equal(found.of(heads), heads[:, :, found.index[0]])


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (16, 64), (4, 8), (1, 32)])
def test_the_projections_move_only_where_that_is_less_arithmetic(heads: int, head_dim: int) -> None:
    hidden_size = heads * head_dim
    for slots in range(1, 3 * head_dim):
        projecting = 2 * hidden_size**2 + 2 * slots * hidden_size
        through = 2 * heads * slots * hidden_size
        moves = absorbs_projections(head_dim, slots=slots)
        assert moves == (slots < head_dim)
        assert not moves or through < projecting
        # With many heads nothing that would pay by more than a part in `heads` is left out.
        assert moves or heads == 1 or through >= projecting * (1 - 1 / heads)
