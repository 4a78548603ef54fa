"""Pooling of a text's tokens is that of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest

from hdruntime.bundle.manifest import TensorSpec
from hdruntime.text.chunking import LateChunks
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import PoolingMode, pooled_text
from hdruntime.text.splitting import as_single_chunk
from support.comparators import assert_close, named_case
from support.pooling import POOLED_BY_HAND

HIDDEN_SIZE = 5

EXACT = (PoolingMode.CLS, PoolingMode.MAX, PoolingMode.LAST_TOKEN)
"""One of the given numbers each; the others are rounded to float32, at up to 4."""


def negative_states(tokens: int) -> np.ndarray:
    """Below zero, so that a zero from elsewhere is the largest value."""
    return np.random.default_rng(3).uniform(-2, -1, (tokens, HIDDEN_SIZE)).astype(np.float32)


def test_poolings_are_as_defined() -> None:
    for pooling in PoolingMode:
        for tokens in (1, 2, 4):
            with named_case(pooling, tokens):
                states = negative_states(tokens)
                vector = pooled_text(states, pooling)
                assert vector.dtype == np.float32
                assert not np.shares_memory(vector, states)
                atol = 0 if pooling in EXACT else 1e-7 if pooling is PoolingMode.MEAN else 3e-7
                assert_close(vector, POOLED_BY_HAND[pooling](states.astype(np.float64)), atol=atol)


def test_nan_in_a_token_stays() -> None:
    for pooling in PoolingMode:
        with named_case(pooling):
            states = negative_states(3)
            states[-1 if pooling is PoolingMode.LAST_TOKEN else 0, 2] = np.nan
            assert np.isnan(pooled_text(states, pooling)).tolist() == [False, False, True, False, False]


def test_poolings_are_those_of_sentence_transformers() -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("sentence_transformers.sentence_transformer.modules.pooling").Pooling
    for pooling in PoolingMode:
        for tokens in (1, 2, 4):
            with named_case(pooling, tokens):
                states = negative_states(tokens)
                mask = torch.ones((1, tokens), dtype=torch.int64)
                features = {"token_embeddings": torch.from_numpy(states[np.newaxis]), "attention_mask": mask}
                expected = theirs(HIDDEN_SIZE, pooling.value)(features)["sentence_embedding"].numpy()[0]
                assert_close(pooled_text(states, pooling), expected, atol=1e-6)


def test_the_mean_of_many_tokens_keeps_its_digits() -> None:
    states = np.full((100_000, 1), 0.1, np.float32)
    assert pooled_text(states, PoolingMode.MEAN) == np.float32(0.1)
    zeros, whole = [0] * len(states), np.array([[0, len(states)]])
    split = as_single_chunk(Encoding(zeros, zeros, [(0, 1)] * len(states), zeros))
    output = TensorSpec(name="last_hidden_state", dtype="float32", shape=(1,))
    chunks = LateChunks(split, spans=whole, tokens=whole[:, 1], pooled=whole, output=output, normalizes=False)
    chunks.add(0, {output.name: states})
    assert chunks.finished().vectors == np.float32(0.1)
