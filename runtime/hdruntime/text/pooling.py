"""Pooling of token vectors to one vector per text."""

from __future__ import annotations

__all__ = ["Pooling", "embedding_output", "embedding_size", "mean_over_tokens", "pooled", "pooled_text"]

from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, TensorSpec
from hdruntime.errors import InputError

Mask = npt.NDArray[np.int64]


class Pooling(str, Enum):
    """How a text's token vectors are combined to one vector; names as in sentence-transformers."""

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    LAST_TOKEN = "lasttoken"
    WEIGHTED_MEAN = "weightedmean"
    MEAN_SQRT_LEN_TOKENS = "mean_sqrt_len_tokens"


def embedding_output(manifest: Manifest) -> TensorSpec:
    """The output with a text's vector: ``sentence_embedding``, else ``last_hidden_state``, which is pooled.

    Raises:
        InputError: the bundle's task has no embeddings.
    """
    outputs = {spec.name: spec for spec in manifest.outputs}
    for name in ("sentence_embedding", "last_hidden_state"):
        if name in outputs:
            return outputs[name]
    advice = "Rebuild it with --task feature-extraction or --task sentence-similarity."
    if manifest.task == "token-similarity":
        advice = "A text has a vector for each token: hdruntime.MultiVectorEncoder gives them."
    raise InputError(f"This bundle's task is {manifest.task}, which gives no embeddings.\n{advice}")


def embedding_size(manifest: Manifest) -> int:
    """Dimensions of a text's vector.

    Raises:
        InputError: the bundle's task has no embeddings.
    """
    size = embedding_output(manifest).shape[-1]
    return size if isinstance(size, int) else manifest.hidden_size


def pooled(hidden_states: FloatArray, attention_mask: Mask, pooling: Pooling) -> FloatArray:
    """One vector per row; padded positions are ignored, wherever they are.

    Args:
        hidden_states: float32 [batch, tokens, hidden_size].
        attention_mask: [batch, tokens], 1 for real tokens, 0 for padding.
        pooling: mean or maximum of each row's real tokens, or the first or last of them; their mean with weights 1, 2,
            3, ... from the first on, places between them counted; or their sum over the root of their number.

    Returns:
        float32 [batch, hidden_size]; zeros for a row without real tokens.
    """
    return _FUNCTIONS[pooling](hidden_states, attention_mask)


def pooled_text(states: FloatArray, pooling: Pooling) -> FloatArray:
    """One vector of a text without padding.

    Args:
        states: float32 [tokens, hidden_size].
        pooling: as of `pooled`.

    Returns:
        float32 [hidden_size].
    """
    if pooling is not Pooling.MEAN:
        return pooled(states[np.newaxis], np.ones((1, len(states)), np.int64), pooling)[0]
    # As `mean_over_tokens` does it, in a fifth of the time: short texts are pooled by the thousand.
    total: npt.NDArray[np.float64] = np.add.reduce(states, axis=0, dtype=np.float64)
    return (total / len(states)).astype(np.float32)


def mean_over_tokens(hidden_states: FloatArray, attention_mask: Mask) -> FloatArray:
    """The mean of each row's real tokens; shapes as in :func:`pooled`."""
    real = attention_mask.astype(bool)[:, :, np.newaxis]
    # A float32 sum over thousands of tokens loses digits; `where` keeps a NaN in the padding out.
    total = np.sum(hidden_states, axis=1, dtype=np.float64, where=real)
    count = np.maximum(real.sum(axis=1), 1)
    return (total / count).astype(np.float32)


def _max_over_tokens(hidden_states: FloatArray, attention_mask: Mask) -> FloatArray:
    """The maximum of each dimension over a row's real tokens; shapes as in :func:`pooled`."""
    real = attention_mask.astype(bool)[:, :, np.newaxis]
    largest = np.max(hidden_states, axis=1, where=real, initial=-np.inf)
    return np.where(real.any(axis=1), largest, np.float32(0))


def _first_token(hidden_states: FloatArray, attention_mask: Mask) -> FloatArray:
    """Each row's first real token, which follows padding on the left.

    Shapes as in :func:`pooled`.
    """
    return _token(hidden_states, attention_mask, attention_mask.astype(bool).argmax(axis=1))


def _last_token(hidden_states: FloatArray, attention_mask: Mask) -> FloatArray:
    """Each row's last real token, before any padding; shapes as in :func:`pooled`."""
    from_end = attention_mask.astype(bool)[:, ::-1].argmax(axis=1)
    return _token(hidden_states, attention_mask, attention_mask.shape[1] - 1 - from_end)


def _token(hidden_states: FloatArray, attention_mask: Mask, numbers: npt.NDArray[np.int64]) -> FloatArray:
    chosen = hidden_states[np.arange(len(numbers)), numbers]
    return np.where(attention_mask.astype(bool).any(axis=1, keepdims=True), chosen, np.float32(0))


def _weighted_mean(hidden_states: FloatArray, attention_mask: Mask) -> FloatArray:
    """The mean of each row's real tokens, later ones weighing more; shapes as in :func:`pooled`."""
    real = attention_mask.astype(bool)
    first = real.argmax(axis=1, keepdims=True)
    weights = np.where(real, np.arange(1, real.shape[1] + 1) - first, 0).astype(np.float64)
    # Not a product with 0: padding may hold NaN.
    kept = np.where(real[:, :, np.newaxis], hidden_states, np.float32(0))
    weighted = np.einsum("btw,bt->bw", kept, weights)
    return (weighted / np.maximum(weights.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def _mean_by_root(hidden_states: FloatArray, attention_mask: Mask) -> FloatArray:
    """The sum of each row's real tokens over the root of their number; shapes as in :func:`pooled`."""
    counts = attention_mask.astype(bool).sum(axis=1, keepdims=True)
    return (mean_over_tokens(hidden_states, attention_mask) * np.sqrt(counts)).astype(np.float32)


_FUNCTIONS: dict[Pooling, Callable[[FloatArray, Mask], FloatArray]] = {
    Pooling.MEAN: mean_over_tokens,
    Pooling.CLS: _first_token,
    Pooling.MAX: _max_over_tokens,
    Pooling.LAST_TOKEN: _last_token,
    Pooling.WEIGHTED_MEAN: _weighted_mean,
    Pooling.MEAN_SQRT_LEN_TOKENS: _mean_by_root,
}
