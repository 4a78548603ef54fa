"""Each pooling mode by hand, in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hdruntime.text.pooling import PoolingMode

POOLED_BY_HAND: dict[PoolingMode, Callable[[np.ndarray], np.ndarray]] = {
    PoolingMode.CLS: lambda tokens: tokens[0],
    PoolingMode.MAX: lambda tokens: tokens.max(axis=0),
    PoolingMode.MEAN: lambda tokens: tokens.mean(axis=0),
    PoolingMode.MEAN_SQRT_LEN_TOKENS: lambda tokens: tokens.sum(axis=0) / np.sqrt(len(tokens)),
    PoolingMode.WEIGHTED_MEAN: lambda tokens: np.average(tokens, axis=0, weights=np.arange(1, len(tokens) + 1)),
    PoolingMode.LAST_TOKEN: lambda tokens: tokens[-1],
}
"""Mode -> the vector of a text's states, float64 [tokens, hidden_size]."""
