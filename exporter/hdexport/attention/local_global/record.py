"""Local attention with sides in words: the record in a manifest."""

from __future__ import annotations

__all__ = ["LocalGlobalAttention"]

from dataclasses import dataclass
from typing import Literal

from hdruntime.bundle.value_types import Size, TokenCount


@dataclass(frozen=True, kw_only=True)
class LocalGlobalAttention:
    """Layers in which a token sees the tokens around it, and sums of blocks of the whole text.

    Attributes:
        layers: how many.
        radius: tokens that one sees on each side.
        side_tokens: tokens of a block whose sum every token sees; 0 for no such sums.
    """

    kind: Literal["local_global"] = "local_global"
    layers: Size
    radius: TokenCount
    side_tokens: TokenCount = 0
