"""Which profile runs a batch, and to which shape the batch is padded for it: pure functions on shapes."""

from __future__ import annotations

__all__ = ["Choice", "Shape", "choose_profile", "longest", "most_rows"]

from collections.abc import Sequence
from typing import NamedTuple

from hdruntime.errors import InputError
from hdruntime.manifest import ProfileShape

_SHORTEST_STEP = 16
"""Tokens; rows of a matrix product that a tensor core takes at a time."""

_STEPS_OF_OCTAVE = 16
"""Lengths between one power of two and the next: padding is at most a sixteenth, and on average half of that.

Every new shape costs: TensorRT updates its state, TensorRT-RTX compiles kernels, CUDA graphs are captured, and some
versions leak (NVIDIA/TensorRT#4849). Texts have any length, so without steps nearly every batch has a shape of its own.
"""


class Shape(NamedTuple):
    """What a batch is computed as: [batch, tokens]."""

    batch: int
    tokens: int


class Choice(NamedTuple):
    """A profile's number, and the shape that a batch is padded to for it."""

    profile: int
    shape: Shape


def choose_profile(profiles: Sequence[ProfileShape], batch: int, tokens: int) -> Choice:
    """The profile that computes least for a batch, and of those that do equally little the narrowest.

    Args:
        profiles: of the engine, in its order.
        batch: rows.
        tokens: of the longest row, padding that the caller made included.

    Raises:
        InputError: no profile takes so many rows or tokens.
    """
    fitting = [
        (index, profile)
        for index, profile in enumerate(profiles)
        if batch <= profile.batch[2] and tokens <= profile.tokens[2]
    ]
    if not fitting:
        raise _too_large(profiles, batch, tokens)
    choices = [(Choice(index, _padded(profile, batch, tokens)), profile) for index, profile in fitting]

    def cost(item: tuple[Choice, ProfileShape]) -> tuple[int, ...]:
        (index, shape), profile = item
        return shape.batch * shape.tokens, profile.tokens[2], profile.batch[2], index

    return min(choices, key=cost)[0]


def most_rows(profiles: Sequence[ProfileShape], tokens: int) -> int:
    """Rows that a batch of that length may have; 0 where no profile takes such a length."""
    return max((profile.batch[2] for profile in profiles if tokens <= profile.tokens[2]), default=0)


def longest(profiles: Sequence[ProfileShape]) -> int:
    """Tokens of the longest row that a profile takes."""
    return max(profile.tokens[2] for profile in profiles)


def _padded(profile: ProfileShape, batch: int, tokens: int) -> Shape:
    wanted = max(tokens, profile.tokens[0])
    return Shape(max(batch, profile.batch[0]), min(_stepped(wanted), profile.tokens[2]))


def _stepped(tokens: int) -> int:
    # Up to 512 tokens in steps of 16, up to 1024 in steps of 32, and so on.
    step = max(_SHORTEST_STEP, (1 << (tokens - 1).bit_length()) // (2 * _STEPS_OF_OCTAVE))
    return -(-tokens // step) * step


def _too_large(profiles: Sequence[ProfileShape], batch: int, tokens: int) -> InputError:
    most = longest(profiles)
    if tokens > most:
        return InputError(
            f"The batch has {tokens} tokens; this engine accepts 1 to {most}.\n"
            f"Truncate it, or rebuild with --max-len {tokens} (or longer --profiles)."
        )
    rows = most_rows(profiles, tokens)
    return InputError(
        f"The batch has {batch} rows of {tokens} tokens; this engine accepts up to {rows} of that length.\n"
        f"Split it, or rebuild with --batch 1:1:{batch}."
    )
