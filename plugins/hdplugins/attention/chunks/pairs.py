"""The work of chunk attention: queries with the keys of the chunks that they see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hdplugins.attention.chunks.neighbours import padded_tokens


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads; each pair counts once.

    Exact, and linear in tokens to compute. A key that counts several times is one pair.

    Args:
        decisive: the attributes of a node.
        tokens: of the text.
        heads: of the attention.
    """
    causal = bool(decisive["causal"])
    sizes = sizes_of_chunks(tokens, decisive["chunk"], decisive["multiple"])
    keys = seen_keys(sizes, decisive["before"], decisive["after"], causal=causal)
    # With `causal`, a query sees of its own chunk the keys up to itself.
    hidden = sizes * (sizes - 1) // 2 if causal else np.zeros_like(sizes)
    return heads * int((sizes * keys - hidden).sum())


def sizes_of_chunks(tokens: int, chunk: int, multiple: int) -> npt.NDArray[np.int64]:
    """The tokens of the text in each chunk of the padded text: [chunks]."""
    return np.clip(tokens - chunk * np.arange(padded_tokens(tokens, multiple) // chunk), 0, chunk)


def seen_keys(sizes: npt.NDArray[np.int64], before: int, after: int, *, causal: bool = False) -> npt.NDArray[np.int64]:
    """The keys in the chunks that each chunk of a circle sees, each chunk once: [chunks].

    Args:
        sizes: real tokens of each chunk, [chunks].
        before: chunks before its own that a chunk sees.
        after: likewise after it.
        causal: whether it sees only chunks of smaller numbers and its own.
    """
    numbers, chunks = np.arange(len(sizes)), len(sizes)
    # As in `neighbours`, a step of `chunks` or more leads to the chunk itself.
    steps = {step % chunks for step in range(-before, after + 1) if abs(step) < chunks}
    keys = np.zeros_like(sizes)
    for step in steps:
        seen = (numbers + step) % chunks
        keys += np.where((seen <= numbers) | (not causal), sizes[seen], 0)
    return keys
