"""Which chunks a chunk sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_chunks(*, chunk: int, before: int, after: int, multiple: int, causal: int) -> None:
    """Refuse attributes that define nothing.

    Raises:
        ValueError: an attribute is out of its range.
    """
    for name, number, least in (("chunk", chunk, 1), ("before", before, 0), ("after", after, 0)):
        if number < least:
            raise ValueError(f"{name} is {number}; it must be {least} or more.")
    if multiple < 1 or multiple % chunk:
        raise ValueError(f"multiple is {multiple}; it must be a multiple of the chunk's {chunk} tokens.")
    if causal not in (0, 1):
        raise ValueError(f"causal is {causal}; it must be 0 or 1.")


def padded_tokens(tokens: int, multiple: int) -> int:
    """The tokens of a text with the padding that makes whole chunks of it."""
    return -(-tokens // multiple) * multiple


def neighbours(chunks: int, before: int, after: int) -> torch.Tensor:
    """The chunks that each chunk sees, in order: [chunks, before + 1 + after], int64.

    They are counted in a circle, and a chunk may be seen several times. As in Hugging Face, a step of `chunks` or more
    leads nowhere: the chunk sees itself once more.
    """
    import torch  # which a machine that only runs a bundle does without

    steps = [step if abs(step) < chunks else 0 for step in range(-before, after + 1)]
    return (torch.arange(chunks)[:, None] + torch.tensor(steps)) % chunks
