"""Windowed attention, with global tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from hdexport.attention.attention_type import DENSE_BASELINE, AttentionRecord
from hdruntime.bundle.checked_json import Length, TokenCount
from hdruntime.bundle.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Window:
    """Windowed attention in place of a model's dense one, as ``--attention window:...`` asks for it.

    Attributes:
        tokens: tokens that a query sees before it, in units of the dilation, and after it unless `right` says
            otherwise; Longformer's ``attention_window`` counts both sides.
        global_tokens: the first real tokens of a text, which see all others and are seen by all; 0 for none.
        dilation: tokens per step of the window: one value per head, or a single one for all heads.
        right: tokens that a query sees after it; None for as many as before it.
    """

    tokens: Length
    global_tokens: TokenCount
    dilation: tuple[Length, ...]
    right: TokenCount | None = None

    @property
    def after(self) -> int:
        """Tokens that a query sees after it, in units of the dilation."""
        return self.tokens if self.right is None else self.right

    @property
    def most_keys(self) -> int:
        """Keys that the query of a local token sees, at most."""
        return self.tokens + 1 + self.after + self.global_tokens

    def describe(self) -> str:
        """The window's two sides: "256 tokens on each side", "256 tokens before and 0 after"."""
        equal = self.tokens == self.after
        return f"{self.tokens} tokens {'on each side' if equal else f'before and {self.after} after'}"


@dataclass(frozen=True, kw_only=True)
class WindowAttention(AttentionRecord):
    """Layers in which a query sees the tokens around it.

    Attributes:
        layers: tokens before a query in the window of each such layer, in graph order.
        converted: the windows that took the place of dense attention; None where the model was trained with them.
        right: tokens after a query where the model was trained with windows; None for as many as before it.
    """

    holds_scores: ClassVar = False
    type: Literal["window"] = "window"
    layers: tuple[TokenCount, ...]
    converted: Window | None = None
    right: TokenCount | None = None

    def sides(self) -> Iterator[tuple[int, int]]:
        """Tokens before and after a query, in each layer."""
        right = self.right if self.converted is None else self.converted.right
        for left in self.layers:
            yield left, left if right is None else right

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """A block of a window's queries meets the window and about a quarter of it more."""
        return [min(tokens, (left + right) * 3 // 2) for left, right in self.sides()]

    @property
    def baseline_note(self) -> str | None:
        """PyTorch's model is dense where windows took that place."""
        return None if self.converted is None else DENSE_BASELINE.format("windows")
