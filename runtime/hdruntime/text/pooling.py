"""Pooling of token vectors to one vector per text."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from hdruntime.arrays import FloatArray, WideArray
from hdruntime.bundle.manifest import Manifest, TensorSpec
from hdruntime.bundle.task_formats import format_of
from hdruntime.errors import InputError

SENTENCE_EMBEDDING = "sentence_embedding"
"""Output with a vector for each text: [batch, embedding_size], float32."""


LAST_HIDDEN_STATE = "last_hidden_state"
"""Output with the states of all tokens: [batch, tokens, width], float32."""


class PoolingMode(StrEnum):
    """How the states of a text's tokens are combined to one vector; sentence-transformers' names and order.

    A new mode needs a function here and one in ``hdexport.checkpoint.pooling``, for graphs.
    """

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN_TOKENS = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST_TOKEN = "lasttoken"


def embedding_output(manifest: Manifest) -> TensorSpec:
    """The output with a text's vector: ``sentence_embedding``, else ``last_hidden_state``, which is pooled."""
    outputs = {spec.name: spec for spec in manifest.outputs}
    for name in (SENTENCE_EMBEDDING, LAST_HIDDEN_STATE):
        if name in outputs:
            return outputs[name]
    hint = format_of(manifest.task).instead_of_embeddings
    raise InputError(f"The bundle's task is {manifest.task}, which has no embeddings.", hint=hint)


def embedding_size(manifest: Manifest) -> int:
    """Dimensions of a text's vector."""
    size = embedding_output(manifest).shape[-1]
    return size if isinstance(size, int) else manifest.hidden_size


def pooled_text(states: FloatArray, mode: PoolingMode) -> FloatArray:
    """One vector of a text without padding, float32 [hidden_size], from its states, float32 [tokens, hidden_size]."""
    return _FUNCTIONS[mode](states)


def _cls(states: FloatArray) -> FloatArray:
    # A copy: a view would hold the batch.
    return states[0].copy()


def _max(states: FloatArray) -> FloatArray:
    return states.max(axis=0)


def _mean(states: FloatArray) -> FloatArray:
    # A float32 sum over thousands of tokens loses digits.
    total: WideArray = np.add.reduce(states, axis=0, dtype=np.float64)
    return (total / len(states)).astype(np.float32)


def _mean_sqrt_len_tokens(states: FloatArray) -> FloatArray:
    """The sum of the tokens divided by the square root of their number."""
    return (_mean(states).astype(np.float64) * np.sqrt(len(states))).astype(np.float32)


def _weighted_mean(states: FloatArray) -> FloatArray:
    weights = np.arange(1, len(states) + 1, dtype=np.float64)
    return (np.einsum("tw,t->w", states, weights) / weights.sum()).astype(np.float32)


def _last_token(states: FloatArray) -> FloatArray:
    return states[-1].copy()


_FUNCTIONS: dict[PoolingMode, Callable[[FloatArray], FloatArray]] = {
    PoolingMode.CLS: _cls,
    PoolingMode.MAX: _max,
    PoolingMode.MEAN: _mean,
    PoolingMode.MEAN_SQRT_LEN_TOKENS: _mean_sqrt_len_tokens,
    PoolingMode.WEIGHTED_MEAN: _weighted_mean,
    PoolingMode.LAST_TOKEN: _last_token,
}
