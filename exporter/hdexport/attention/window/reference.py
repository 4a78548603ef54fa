"""A model's own attention made windowed by a mask for every pair of tokens.

This is what bundles with ``--attention window:...`` are compared with: PyTorch's attention and a mask, nothing of ours.
"""

from __future__ import annotations

__all__ = ["use_window_masks"]

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hdexport.attention.model_parts import wrap_layers
from hdexport.attention.pair_counts import PairCounts, use_pair_counts
from hdexport.attention.window.record import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Pairs(PairCounts):
    """Which queries see which keys.

    Attributes:
        window: of every layer.
        real: [batch, tokens], bool.
        is_global: [batch, tokens], bool.
    """

    window: Window
    real: torch.Tensor
    is_global: torch.Tensor

    def of_queries(self, module: torch.nn.Module, queries: slice) -> torch.Tensor:
        """[batch, 1 or heads, queries, tokens], 1 where a query sees a key, else 0; see :class:`PairCounts`."""
        places = torch.arange(self.real.shape[1])
        offset = places[None, :] - places[queries, None]
        step = torch.tensor(self.window.dilation)[:, None, None]
        near = ((offset.abs() <= self.window.tokens * step) & (offset % step == 0))[None]
        seen = near | self.is_global[:, None, None, :] | self.is_global[:, None, queries, None]
        return (seen & self.real[:, None, None, :]).float()

    def keys(self) -> torch.Tensor:
        """[batch, 1, tokens, 1], all for global tokens, for others what a window holds; see :class:`PairCounts`."""
        real = self.real.sum(1)[:, None, None, None]
        local = real.clamp(max=2 * self.window.tokens + 1 + self.window.global_tokens)
        return torch.where(self.is_global[:, None, :, None], real, local)


def use_window_masks(model: PreTrainedModel, window: Window) -> None:
    """Make a model's own attention that of a window, in place."""

    def pairs(attention_mask: torch.Tensor) -> _Pairs:
        real = attention_mask.bool()
        return _Pairs(window, real, real & (real.long().cumsum(1) <= window.global_tokens))

    use_pair_counts(model)
    wrap_layers(model, lambda states, mask, layers: layers(states, pairs(mask)))
