"""Batches of every kind of padding, for comparing a bundle with its checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE


def batches(tokens: int, *, sizes: Collection[int] = (1, 3)) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The name, ids and mask, both int64 [batch, tokens], of every batch of these sizes that is tried at a length.

    The batch of 1 has a text of two thirds; the batch of 3 has a whole one and one of a single token besides.
    """
    generator = np.random.default_rng(tokens)
    part = -(-2 * tokens // 3)
    for lengths in ((part,), (part, tokens, 1)):
        if len(lengths) not in sizes:
            continue
        ids = generator.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (len(lengths), tokens))
        index = np.arange(tokens)
        right = np.stack([index < length for length in lengths]).astype(np.int64)
        yield f"no padding, batch {len(lengths)}", ids, np.ones_like(ids)
        if part == tokens:
            continue
        # The content of padding must not matter: on the right ordinary ids do.
        yield f"padding on the right, batch {len(lengths)}", ids, right
        left = right[:, ::-1].copy()
        # Models that number positions by padding do so by the ids.
        yield f"padding on the left, batch {len(lengths)}", np.where(left == 1, ids, PAD_TOKEN_ID), left
        holes = (generator.random(ids.shape) < 0.6).astype(np.int64)
        holes[:, tokens // 2] = 1
        yield f"holes, batch {len(lengths)}", ids, holes


def cases(
    lengths: Iterable[int], *, sizes: Collection[int] = (1, 3)
) -> Iterator[tuple[int, str, np.ndarray, np.ndarray]]:
    """Tokens, name, ids and mask of every batch at every length."""
    for tokens in lengths:
        for name, input_ids, attention_mask in batches(tokens, sizes=sizes):
            yield tokens, name, input_ids, attention_mask
