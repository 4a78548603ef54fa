"""Windowed attention in words: what was requested, and what a manifest says."""

from __future__ import annotations

__all__ = ["Window", "WindowAttention"]

from dataclasses import dataclass
from typing import Literal

from hdruntime.bundle.manifest import Length, TokenCount


@dataclass(frozen=True, kw_only=True)
class Window:
    """Windowed attention in place of a model's dense one, as ``--attention window:...`` asks for it.

    Attributes:
        tokens: tokens that a query sees on *each* side, in units of the dilation; Longformer's ``attention_window``
            counts both sides.
        global_tokens: the first real tokens of a text, which see all others and are seen by all; 0 for none.
        dilation: tokens per step of the window: one value per head, or a single one for all heads.
    """

    tokens: Length
    global_tokens: TokenCount
    dilation: tuple[Length, ...]

    @property
    def most_keys(self) -> int:
        """Keys that the query of a local token sees, at most."""
        return 2 * self.tokens + 1 + self.global_tokens


@dataclass(frozen=True, kw_only=True)
class WindowAttention:
    """Layers in which a query sees the tokens around it.

    Attributes:
        layers: tokens on each side of the window of each such layer, in graph order.
        converted: the windows that took the place of dense attention; None where the model was trained with them.
    """

    kind: Literal["window"] = "window"
    layers: tuple[TokenCount, ...]
    converted: Window | None = None
