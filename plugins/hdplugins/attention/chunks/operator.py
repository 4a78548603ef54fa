"""Chunk attention: a chunk of tokens sees itself and the chunks around it, as if the sequence were a circle.

It is the attention of Reformer's ``local`` layers. `reference` defines each attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hdplugins.attention.operator import FLAG, Operator, Range

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries with the keys of the chunks that they see; see `Operator.pairs`."""
    causal = bool(attributes["causal"])
    sizes = sizes_of_chunks(tokens, attributes["chunk"], attributes["multiple"])
    keys = seen_keys(sizes, attributes["before"], attributes["after"], causal=causal)
    # With `causal`, a query sees of its own chunk the keys up to itself.
    hidden = sizes * (sizes - 1) // 2 if causal else 0 * sizes
    return heads * int((sizes * keys - hidden).sum())


def sizes_of_chunks(tokens: int, chunk: int, multiple: int) -> npt.NDArray[np.int64]:
    """The tokens of the sequence in each chunk of the padded sequence: [chunks]."""
    import numpy as np

    return np.clip(tokens - chunk * np.arange(padded_tokens(tokens, multiple) // chunk), 0, chunk)


def seen_keys(sizes: npt.NDArray[np.int64], before: int, after: int, *, causal: bool = False) -> npt.NDArray[np.int64]:
    """The keys in the chunks that each chunk of a circle sees, each chunk once: [chunks].

    Args:
        sizes: real tokens of each chunk, [chunks].
        before: number of chunks before a chunk that it sees.
        after: number of chunks after a chunk that it sees.
        causal: whether a chunk sees no later chunk.
    """
    import numpy as np

    numbers, chunks = np.arange(len(sizes)), len(sizes)
    # As in the reference's `neighbours`, a step of `chunks` or more leads to the chunk itself.
    steps = {step % chunks for step in range(-before, after + 1) if abs(step) < chunks}
    keys = np.zeros_like(sizes)
    for step in steps:
        seen = (numbers + step) % chunks
        keys += np.where((seen <= numbers) | (not causal), sizes[seen], 0)
    return keys


def padded_tokens(tokens: int, multiple: int) -> int:
    """The tokens of a sequence padded to whole chunks."""
    return -(-tokens // multiple) * multiple


def check_chunks(attributes: Mapping[str, Any]) -> None:
    """Raise a ValueError for a padded length that is not a multiple of the chunk; see `Operator.check_fit`."""
    chunk, multiple = attributes["chunk"], attributes["multiple"]
    if multiple < 1 or multiple % chunk:
        raise ValueError(f"multiple is {multiple}; it must be a multiple of the chunk's {chunk} tokens.")


CIRCLE = {"chunk": Range(1), "before": Range(0), "after": Range(0)}
"""The attributes of chunks that form a circle."""

OPERATOR = Operator(
    name="ChunkAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "token_mask"),
    attributes={**CIRCLE, "multiple": None, "causal": FLAG, "scale": None},
    check_fit=check_chunks,
    pairs=pairs,
)
