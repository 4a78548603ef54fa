"""Pooling ignores padding, whatever its position and content."""

from __future__ import annotations

import numpy as np
import pytest

from hdruntime.text.pooling import Pooling, pooled
from support.comparators import assert_close, named_case

HIDDEN_SIZE = 5

MASKS = {
    "none": [1, 1, 1, 1],
    "right": [1, 1, 0, 0],
    "left": [0, 0, 1, 1],
    "both": [0, 1, 1, 0],
    "holes": [1, 0, 0, 1],
    "one": [0, 0, 1, 0],
}


def weighted(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    weights = places - places[0] + 1
    return weights @ tokens / weights.sum()


EXPECTED = {
    Pooling.MEAN: lambda tokens, places: tokens.mean(axis=0),
    Pooling.CLS: lambda tokens, places: tokens[0],
    Pooling.MAX: lambda tokens, places: tokens.max(axis=0),
    Pooling.LAST_TOKEN: lambda tokens, places: tokens[-1],
    Pooling.WEIGHTED_MEAN: weighted,
    Pooling.MEAN_SQRT_LEN_TOKENS: lambda tokens, places: tokens.sum(axis=0) / np.sqrt(len(tokens)),
}
"""Of a row's real tokens alone, float64 [tokens, hidden_size], and where they stand."""


EXACT = (Pooling.CLS, Pooling.MAX, Pooling.LAST_TOKEN)
"""One of the given numbers each; the others are rounded to float32, at up to 4."""


def negative_states(rows: int, tokens: int) -> np.ndarray:
    """Below zero, so that a zero taken from the padding is the largest value."""
    values = np.random.default_rng(3).uniform(-2, -1, (rows, tokens, HIDDEN_SIZE))
    return values.astype(np.float32)


def test_what_padding_holds_does_not_matter() -> None:
    for pooling in Pooling:
        for padding in [0.0, np.nan, np.inf, 1e30]:
            with named_case(padding):
                mask = np.array(list(MASKS.values()))
                states = negative_states(*mask.shape)
                expected = np.stack(
                    [
                        EXPECTED[pooling](row[kept == 1].astype(np.float64), np.flatnonzero(kept))
                        for row, kept in zip(states, mask, strict=True)
                    ]
                )
                states[mask == 0] = padding
                vectors = pooled(states, mask, pooling)
                assert vectors.dtype == np.float32
                assert_close(
                    vectors, expected, atol=0 if pooling in EXACT else 1e-7 if pooling is Pooling.MEAN else 3e-7
                )


def test_a_row_without_real_tokens_is_zeros() -> None:
    for pooling in Pooling:
        for padding in [1.0, np.nan, -np.inf]:
            with named_case(padding):
                states = negative_states(2, 3)
                states[1] = padding
                vectors = pooled(states, np.array([[1, 1, 1], [0, 0, 0]]), pooling)
                assert (vectors[1] == 0).all()
                assert (vectors[0] < 0).all()


def test_nan_in_a_real_token_stays() -> None:
    for pooling in Pooling:
        with named_case(pooling):
            states = negative_states(1, 3)
            states[0, -1 if pooling is Pooling.LAST_TOKEN else 0, 2] = np.nan
            assert np.isnan(pooled(states, np.ones((1, 3), np.int64), pooling)[0]).tolist() == [
                False,
                False,
                True,
                False,
                False,
            ]


def test_poolings_are_those_of_sentence_transformers() -> None:
    for pooling in Pooling:
        with named_case(pooling):
            torch = pytest.importorskip("torch")
            theirs = pytest.importorskip("sentence_transformers.sentence_transformer.modules.pooling").Pooling
            mask = np.array([MASKS[name] for name in ("none", "right", "left", "both")])
            states = negative_states(*mask.shape)
            features = {"token_embeddings": torch.from_numpy(states), "attention_mask": torch.from_numpy(mask)}
            expected = theirs(HIDDEN_SIZE, pooling.value)(features)["sentence_embedding"].numpy()
            assert_close(pooled(states, mask, pooling), expected, atol=1e-6)


def test_the_mean_of_many_tokens_keeps_its_digits() -> None:
    states = np.full((1, 100_000, 1), 0.1, np.float32)
    assert pooled(states, np.ones((1, 100_000), np.int64), Pooling.MEAN) == np.float32(0.1)
