"""The right answer of a model with windows: Hugging Face's model under a mask of every pair of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hdexport.attention.registry import attention_from_spec
from hdexport.families import convertible_model_types
from support.hugging_face import AFTER_PADDING_ROW
from support.tiny_models import COPIES, PAD_TOKEN_ID

WINDOWED_TYPES = [name for name in convertible_model_types() if name not in COPIES]


def pair_mask(attention_mask: np.ndarray, spec: str, *, heads: int = 4) -> np.ndarray:
    """[batch, heads, tokens, tokens], True where the third axis sees the fourth: the definition, pair by pair."""
    window = attention_from_spec(spec)["window"].window
    steps = window.dilation * (heads // len(window.dilation))
    tokens = attention_mask.shape[1]
    offset = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    seen = np.zeros((len(attention_mask), heads, tokens, tokens), bool)
    for row, real in enumerate(attention_mask):
        first = np.flatnonzero(real)[: window.global_tokens]
        for head, step in enumerate(steps):
            after = window.tokens if window.right is None else window.right
            seen[row, head] = (-window.tokens * step <= offset) & (offset <= after * step) & (offset % step == 0)
            seen[row, head][:, first] = True
            seen[row, head][first, :] = True
        seen[row] &= real.astype(bool)
    return seen


def positions(input_ids: np.ndarray, *, after_padding_row: bool) -> np.ndarray:
    """The numbers that Hugging Face would give the tokens if it had a [batch, tokens] mask."""
    real = input_ids != PAD_TOKEN_ID
    counted = np.cumsum(real, axis=1) * real + PAD_TOKEN_ID
    return counted if after_padding_row else np.arange(input_ids.shape[1])[None]


def expected_of(bundle: Any, feeds: Mapping[str, np.ndarray], pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Hugging Face's answer under a mask of all pairs, [batch, heads, tokens, tokens]; see `pair_mask`."""
    others = {name: values for name, values in feeds.items() if name not in ("input_ids", "attention_mask")}
    if bundle.manifest.model_type != "distilbert":
        after_padding_row = bundle.manifest.model_type in AFTER_PADDING_ROW
        others["position_ids"] = positions(feeds["input_ids"], after_padding_row=after_padding_row)
    with _embedded_by(bundle, feeds["attention_mask"]):
        return bundle.hugging_face(feeds["input_ids"], pairs, **others)


@contextlib.contextmanager
def _embedded_by(bundle: Any, attention_mask: np.ndarray) -> Iterator[None]:
    """ESM's embeddings count the real tokens in their mask, [batch, tokens]."""
    if bundle.manifest.model_type != "esm":
        yield
        return
    embeddings = bundle.hugging_face.model.base_model.embeddings
    original, mask = embeddings.forward, torch.from_numpy(attention_mask)
    embeddings.forward = lambda **named: original(**(named | {"attention_mask": mask}))
    try:
        yield
    finally:
        del embeddings.forward
