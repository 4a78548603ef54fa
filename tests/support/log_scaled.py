"""Hugging Face's models with an attention in NumPy, float64, whose queries grow with the logarithm of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support.hugging_face import HuggingFace
from support.tiny_models import BASE

Pairs = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Mask [batch, tokens] -> how often queries see keys, [batch, queries, keys], and each query's n, [batch, queries]."""


def dense(attention_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every query sees every real token."""
    times = np.repeat(attention_mask[:, None, :], attention_mask.shape[1], axis=1)
    return times, times.sum(2)


def window(tokens: int, global_tokens: int = 0) -> Pairs:
    """So many tokens on each side, and the first real tokens, whose own queries see every token."""

    def pairs(attention_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place, real = np.arange(attention_mask.shape[1]), attention_mask == 1
        is_global = real & (np.cumsum(attention_mask, axis=1) <= global_tokens)
        near = np.abs(place[:, None] - place[None, :]) <= tokens
        times = (near | is_global[:, None, :] | is_global[:, :, None]) & real[:, None, :]
        count = real.sum(1)[:, None]
        return times, np.where(is_global, count, np.minimum(count, 2 * tokens + 1 + global_tokens))

    return pairs


def bigbird(block: int, random: int) -> Pairs:
    """BigBird as Hugging Face evaluates it: all random blocks are block 0. The blocks are the padded batch's."""

    def pairs(attention_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = attention_mask.shape[1]
        count = attention_mask.sum(1)[:, None]
        if tokens <= (5 + 2 * random) * block:
            return dense(attention_mask)
        of_token = np.arange(tokens) // block
        last = of_token[-1]
        times = (np.abs(of_token[:, None] - of_token[None, :]) <= 1) | np.isin(of_token, (0, last))[None, :]
        times = times + random * (of_token == 0)[None, :]
        times[np.isin(of_token, (0, last))] = 1
        return times * attention_mask[:, None, :], np.repeat(np.minimum(count, 5 * block), tokens, axis=1)

    return pairs


class LogScaled:
    """A tiny bundle's checkpoint in transformers, its attention the definition.

    Args:
        bundle: a `TinyBundle`.
        pairs: of every layer, but of the layers that the library windows itself.
        base: of the logarithm.
    """

    def __init__(self, bundle: Any, pairs: Pairs, *, base: int = BASE) -> None:
        self._hugging_face = HuggingFace(bundle.checkpoint, bundle.manifest.task, max_len=bundle.manifest.max_len)
        self._pairs, self._base = pairs, base
        self._mask = np.zeros((0, 0), np.int64)
        name = f"log-scaled-{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *_, **__: None)
        self._hugging_face.model.config._attn_implementation = name

    def __call__(self, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs by name for inputs by name."""
        self._mask = feeds["attention_mask"]
        return self._hugging_face(**feeds)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        pairs = self._pairs if sliding_window is None else window(sliding_window - 1)
        times, keys = pairs(self._mask)
        factors = np.maximum(1.0, np.log(np.maximum(keys, 1)) / np.log(self._base))[:, None, :, None]
        q, k, v = (state.double().numpy() for state in (query, key, value))
        scores = (q * factors) @ np.swapaxes(k, 2, 3) * q.shape[-1] ** -0.5
        weights = times[:, None] * np.exp(scores - scores.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        attended = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ v
        return torch.from_numpy(np.swapaxes(attended, 1, 2).copy()).to(query.dtype), None
