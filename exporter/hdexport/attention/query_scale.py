"""Queries that grow with the logarithm of the keys they see, so that attention over longer texts stays as sharp.

A softmax over more keys is flatter. Su Jianlin ("entropy invariance", 2021) multiplies queries by ln n / ln L0, for n
keys and L0 trained positions; here by no less than 1, so that texts of trained lengths keep every bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hdruntime.bundle.manifest import Positions
from hdruntime.errors import InputError, Setting


@dataclass(frozen=True)
class LogScale:
    """The factor max(1, ln n / ln base) for queries that see n keys; one for each text.

    `base` is the positions that the checkpoint was trained with; an InputError rejects one without a logarithm to
    divide by.
    """

    base: int

    def __post_init__(self) -> None:
        if self.base < 2:
            raise InputError(
                Setting("attention_scale", "logn"),
                f" divides by the logarithm of the number of trained positions, which is {self.base}.",
                hint=("Use ", Setting("attention_scale", "none"), "."),
            )

    @classmethod
    def of_positions(cls, positions: Positions) -> LogScale | None:
        """The factor that a manifest records; None where no text is long enough for another than 1."""
        scale = cls(positions.trained or positions.base) if positions.attention_scale == "logn" else None
        return None if scale is None or not scale.changes(positions.rows) else scale

    def changes(self, most: int) -> bool:
        """Whether queries that see at most so many keys are ever multiplied by another number than 1."""
        return most > self.base

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The factors, exactly 1 up to `base` keys on every backend, since all of them know that ln 1 is 0.

        `tokens`, [batch], of any type, are the keys that a text's queries see; the factors are [batch, 1, 1, 1],
        float32.
        """
        ratio = tokens.float().clamp(min=self.base) / self.base
        return (1 + ratio.log() * (1 / math.log(self.base)))[:, None, None, None]

    def for_mask(self, mask: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """The factors, [batch, 1, 1, 1], float32, of texts whose queries see all real tokens, or `most` of them.

        `mask` is [batch, tokens], nonzero for real tokens.
        """
        real = mask.bool().float().sum(1)
        return self.of(real if most is None else real.clamp(max=most))


def scaled(query: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Queries, [batch, tokens, heads, head_dim], times the factors of their texts, [batch, 1, 1, 1], float32, or None
    for none; multiplied in float32 and rounded once."""
    return query if factors is None else (query.float() * factors).to(query.dtype)
