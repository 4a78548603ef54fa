"""Relative attention in words: the record in a manifest."""

from __future__ import annotations

__all__ = ["RelativeAttention"]

from dataclasses import dataclass
from typing import Literal

from hdruntime.bundle.value_types import Size, TokenCount


@dataclass(frozen=True, kw_only=True)
class RelativeAttention:
    """Layers whose scores are of a key's content and of its distance, after Transformer-XL.

    Attributes:
        layers: how many.
        memory: tokens of earlier calls that are remembered; 0 for none.
        reuse: of a call's tokens, how many may be remembered: the first ones; 0 for all.
        reach: distances that a query sees, its own 0 included; 0 for all.
        clamp: distances beyond it count as it; 0 for none.
        causal: whether tokens see earlier ones only.
        empty_memory_is_seen: whether a memory that nothing was put in yet is attended to, as zeros.
    """

    kind: Literal["relative"] = "relative"
    layers: Size
    memory: TokenCount
    reuse: TokenCount = 0
    reach: TokenCount = 0
    clamp: TokenCount = 0
    causal: bool = False
    empty_memory_is_seen: bool = False
