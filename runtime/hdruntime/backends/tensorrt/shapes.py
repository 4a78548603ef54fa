"""The profile that runs a batch, and the shape to pad the batch to: pure functions on shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hdruntime.bundle.manifest import ProfileShape
from hdruntime.errors import BackendUnavailableError, InputError, Setting
from hdruntime.gpu.layout import Shape, ShapeChoice

_SHORTEST_STEP = 16
"""Tokens; rows of a matrix product that a tensor core computes at once."""

_STEPS_OF_OCTAVE = 16
"""Lengths between one power of two and the next: padding is at most a sixteenth, and on average half of that.

Every new shape costs: TensorRT updates its state, TensorRT-RTX compiles kernels, CUDA graphs are captured, and some
versions leak (NVIDIA/TensorRT#4849). Texts have any length, so without steps nearly every batch has a shape of its own.
"""


def choose_profile(
    profiles: Sequence[ProfileShape],
    batch: int,
    tokens: int,
    *,
    memory: int = 0,
    limit: int = sys.maxsize,
) -> ShapeChoice:
    """The profile that computes the fewest tokens for a batch; among equals, the narrowest.

    Args:
        tokens: number of tokens of the longest row, including the caller's padding.
        memory: size of the axis ``memory``; 0 without one, or for any size.
        limit: most tokens that a batch of this length may be padded to; see `Manifest.padding_limit`.

    Raises:
        InputError: no profile accepts so many rows or tokens, or such a memory.
    """
    fitting = [
        (index, profile)
        for index, profile in enumerate(profiles)
        if batch <= profile.batch[2] and _takes(profile, tokens, limit)
    ]
    if not fitting:
        raise _too_large(profiles, batch, tokens, limit)
    fitting = [(index, profile) for index, profile in fitting if _remembers(profile, memory)]
    if not fitting:
        raise _no_such_memory(profiles, memory)

    def shape(profile: ProfileShape) -> Shape:
        return Shape(max(batch, profile.batch[0]), _padded(profile, tokens, limit), memory)

    def cost(item: tuple[int, ProfileShape]) -> tuple[int, ...]:
        index, profile = item
        rows, length, _ = shape(profile)
        return rows * length, profile.tokens[2], profile.batch[2], index

    index, best = min(fitting, key=cost)
    return ShapeChoice(index, shape(best))


def max_rows(profiles: Sequence[ProfileShape], tokens: int, *, limit: int = sys.maxsize) -> int:
    """Most rows of a batch of this length; 0 if no profile accepts the length."""
    return max((profile.batch[2] for profile in profiles if _takes(profile, tokens, limit)), default=0)


def longest(profiles: Sequence[ProfileShape]) -> int:
    """Tokens of the longest row that a profile accepts."""
    return max(profile.tokens[2] for profile in profiles)


def check_limits(profiles: Sequence[ProfileShape], limit_of: Callable[[int], int]) -> None:
    """Reject an engine that would have to pad some rows beyond their limit, which `Manifest.padding_limit` gives."""
    tokens, last = 0, longest(profiles)
    while tokens < last:
        limit = limit_of(tokens + 1)
        # A profile that accepts the longest row of a limit also accepts shorter ones.
        tokens = min(limit, last)
        if not max_rows(profiles, tokens, limit=limit):
            raise BackendUnavailableError(
                f"The engine runs {tokens} tokens only with padding to more than {limit}, which changes the outputs: "
                "in this bundle the last block of BigBird's attention is the last block of the padded batch.",
                hint=(
                    "Rebuild the engine with ",
                    Setting("profiles", command="rebuild"),
                    " from 1 token on, or build the bundle again with ",
                    Setting("bigbird_last_block", "row", command="build"),
                    ".",
                ),
            )


def _takes(profile: ProfileShape, tokens: int, limit: int) -> bool:
    return tokens <= profile.tokens[2] and profile.tokens[0] <= limit


def _remembers(profile: ProfileShape, memory: int) -> bool:
    return not memory or profile.memory is None or profile.memory[0] <= memory <= profile.memory[2]


def _padded(profile: ProfileShape, tokens: int, limit: int) -> int:
    return min(_stepped(max(tokens, profile.tokens[0])), profile.tokens[2], limit)


def _stepped(tokens: int) -> int:
    # Up to 512 tokens in steps of 16, up to 1024 in steps of 32, and so on.
    step = max(_SHORTEST_STEP, (1 << (tokens - 1).bit_length()) // (2 * _STEPS_OF_OCTAVE))
    return -(-tokens // step) * step


def _too_large(profiles: Sequence[ProfileShape], batch: int, tokens: int, limit: int) -> InputError:
    most = longest(profiles)
    if tokens > most:
        return InputError(
            f"The batch has {tokens} tokens; this engine accepts 1 to {most}.",
            hint=(
                "Truncate it, rebuild with longer ",
                Setting("profiles", command="rebuild"),
                ", or build the bundle again with ",
                Setting("max_len", tokens, command="build"),
                ".",
            ),
        )
    rows = max_rows(profiles, tokens, limit=limit)
    return InputError(
        f"The batch has {batch} rows of {tokens} tokens; this engine accepts up to {rows} of that length.",
        hint=("Split it, or rebuild with ", Setting("batch", f"1:1:{batch}", command="rebuild"), "."),
    )


def _no_such_memory(profiles: Sequence[ProfileShape], memory: int) -> InputError:
    accepted = " or ".join(
        sorted({f"{profile.memory[0]} to {profile.memory[2]}" for profile in profiles if profile.memory})
    )
    return InputError(
        f"The memories have {memory} tokens; this engine accepts {accepted}.",
        hint="Give it other memories, or rebuild the engine with a profile for these.",
    )
