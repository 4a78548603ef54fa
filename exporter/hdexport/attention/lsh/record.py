"""LSH attention in words: the request, and the record in a manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hdruntime.bundle.value_types import Count, Length, TokenCount

LayerType = Literal["lsh", "local"]


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks that a query sees.

    Attributes:
        tokens: of a chunk.
        before: chunks before its own.
        after: chunks after it.
    """

    tokens: Length
    before: TokenCount
    after: TokenCount

    @property
    def keys(self) -> int:
        """Tokens that a query sees."""
        return self.tokens * (self.before + 1 + self.after)


@dataclass(frozen=True, kw_only=True)
class Hashes:
    """How tokens are hashed.

    Attributes:
        buckets: factors of the number of buckets, each even.
        rounds: of hashing.
        seed: of the rotations.
    """

    buckets: tuple[Length, ...]
    rounds: Length
    seed: Count


@dataclass(frozen=True, kw_only=True)
class LshAttention:
    """Layers whose tokens are sorted by hashes and cut into chunks, and, in a Reformer, layers of chunks unsorted.

    Attributes:
        layers: the kind of each layer.
        hashes: of the layers ``lsh``; None without such layers.
        hashed: the chunks of their sorted tokens; likewise.
        local: the chunks of the layers ``local``; None without such layers.
        multiple: of how many tokens a text is after padding, in which whole chunks fit.
        causal: whether tokens see earlier ones only.
        converted: whether it took the place of dense attention; then padding changes no answer.
    """

    kind: Literal["lsh"] = "lsh"
    layers: tuple[LayerType, ...]
    hashes: Hashes | None
    hashed: Chunks | None
    local: Chunks | None
    multiple: Length
    causal: bool = False
    converted: bool = False


@dataclass(frozen=True, kw_only=True)
class LshRequest:
    """LSH attention as requested; None for a field that was not given.

    Attributes:
        chunk: tokens of a chunk.
        before: chunks before its own that a query sees.
        after: chunks after it.
        buckets: factors of the number of buckets.
        rounds: of hashing.
        seed: of the rotations.
    """

    chunk: int | None = None
    before: int | None = None
    after: int | None = None
    buckets: tuple[int, ...] | None = None
    rounds: int | None = None
    seed: int | None = None


def buckets_for(tokens: int, *, chunk: int, positions: int) -> tuple[int, ...]:
    """The buckets that Hugging Face's Reformer takes where its ``num_buckets`` is None and a text is the first.

    Twice as many as chunks, rounded down to a power of two, and in two factors where they are many.

    Args:
        tokens: of the text, with its padding.
        chunk: tokens of a chunk.
        positions: of the model.
    """
    power = max(1, (2 * (tokens // chunk)).bit_length() - 1)
    if 2**power > 2 * max(math.isqrt(positions // chunk), chunk):
        return 2 ** (power // 2), 2 ** (power - power // 2)
    return (2**power,)
