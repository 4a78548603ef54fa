"""Pooling of token vectors to one vector per text."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np

from hdruntime.arrays import FloatArray, WideArray
from hdruntime.bundle.manifest import Manifest, TensorSpec
from hdruntime.bundle.task_formats import format_of
from hdruntime.errors import InputError

SENTENCE_EMBEDDING = "sentence_embedding"
"""Output with a vector for each text: [batch, embedding_size], float32."""


class Pooling(str, Enum):
    """How a text's token vectors are combined to one vector; names as in sentence-transformers."""

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    LAST_TOKEN = "lasttoken"
    WEIGHTED_MEAN = "weightedmean"
    MEAN_SQRT_LEN_TOKENS = "mean_sqrt_len_tokens"


def embedding_output(manifest: Manifest) -> TensorSpec:
    """The output with a text's vector: ``sentence_embedding``, else ``last_hidden_state``, which is pooled."""
    outputs = {spec.name: spec for spec in manifest.outputs}
    for name in (SENTENCE_EMBEDDING, "last_hidden_state"):
        if name in outputs:
            return outputs[name]
    advice = format_of(manifest.task).instead_of_embeddings
    raise InputError(f"This bundle's task is {manifest.task}, which gives no embeddings.", hint=advice)


def embedding_size(manifest: Manifest) -> int:
    """Dimensions of a text's vector."""
    size = embedding_output(manifest).shape[-1]
    return size if isinstance(size, int) else manifest.hidden_size


def pooled_text(states: FloatArray, pooling: Pooling) -> FloatArray:
    """One vector of a text without padding, float32 [hidden_size], from its states, float32 [tokens, hidden_size].

    It is the mean or the maximum of the tokens, or the first or the last token; the mean with weights 1, 2, 3, ...; or
    the sum over the root of the number of tokens.
    """
    return _FUNCTIONS[pooling](states)


def _mean(states: FloatArray) -> FloatArray:
    # A float32 sum over thousands of tokens loses digits.
    total: WideArray = np.add.reduce(states, axis=0, dtype=np.float64)
    return (total / len(states)).astype(np.float32)


def _weighted_mean(states: FloatArray) -> FloatArray:
    weights = np.arange(1, len(states) + 1, dtype=np.float64)
    return (np.einsum("tw,t->w", states, weights) / weights.sum()).astype(np.float32)


def _mean_by_root(states: FloatArray) -> FloatArray:
    return (_mean(states).astype(np.float64) * np.sqrt(len(states))).astype(np.float32)


_FUNCTIONS: dict[Pooling, Callable[[FloatArray], FloatArray]] = {
    Pooling.MEAN: _mean,
    # Copies: a view would hold the batch.
    Pooling.CLS: lambda states: states[0].copy(),
    Pooling.MAX: lambda states: states.max(axis=0),
    Pooling.LAST_TOKEN: lambda states: states[-1].copy(),
    Pooling.WEIGHTED_MEAN: _weighted_mean,
    Pooling.MEAN_SQRT_LEN_TOKENS: _mean_by_root,
}
