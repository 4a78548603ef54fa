"""A model's own attention made windowed by a mask for every pair of tokens.

Bundles with ``--attention window:...`` are compared with this: PyTorch's attention and a mask, nothing of ours.
"""

from __future__ import annotations

__all__ = ["use_window_masks"]

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hdexport.attention.model_parts import wrap_layers
from hdexport.attention.pair_counts import PairCounts, use_pair_counts
from hdexport.attention.window.record import Window
from hdexport.model.memories import MASK, Memories, remembered, text_ends

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Pairs(PairCounts):
    """Which queries see which keys.

    Attributes:
        window: of every layer.
        real: [batch, keys], bool; queries are the last of them.
        is_global: [batch, keys], bool.
        memories: keys and values of the tokens before the queries; None for none.
        layers: numbers of the layers that have not attended yet.
    """

    window: Window
    real: torch.Tensor
    is_global: torch.Tensor
    memories: Memories | None = None
    layers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def before(self) -> int:
        """Keys before the first query."""
        return 0 if self.memories is None else self.memories.given(MASK).shape[1]

    def carried(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the memory are in front, [batch, memory, 2 * width]; see :class:`PairCounts`."""
        if self.memories is None:
            return key, value
        layer, states = next(self.layers), torch.cat([key, value], dim=1).transpose(1, 2)
        memory = self.memories.given(layer)
        ends = text_ends(self.real[:, self.before :])
        self.memories.leave(layer, remembered(memory, states.flatten(2), ends))
        both = torch.cat([memory.unflatten(2, states.shape[2:]), states], dim=1)  # [batch, keys, 2 * heads, head_dim]
        keys, values = both.transpose(1, 2).chunk(2, dim=1)
        return keys, values

    def of_queries(self, module: torch.nn.Module, queries: slice) -> torch.Tensor:
        """[batch, 1 or heads, queries, keys], 1 where a query sees a key, else 0; see :class:`PairCounts`."""
        places = torch.arange(self.real.shape[1])
        asking = places[self.before :][queries]
        offset = places[None, :] - asking[:, None]
        step = torch.tensor(self.window.dilation)[:, None, None]
        left, right = self.window.tokens * step, self.window.after * step
        near = ((offset >= -left) & (offset <= right) & (offset % step == 0))[None]
        seen = near | self.is_global[:, None, None, :] | self.is_global[:, None, asking, None]
        return (seen & self.real[:, None, None, :]).float()

    def keys(self) -> torch.Tensor:
        """[batch, 1, tokens, 1]: all keys for global tokens, a window's for others; see :class:`PairCounts`."""
        real = self.real.sum(1)[:, None, None, None]
        local = real.clamp(max=self.window.most_keys)
        return torch.where(self.is_global[:, None, self.before :, None], real, local)


def use_window_masks(model: PreTrainedModel, window: Window, memories: Memories | None = None) -> None:
    """Give a model's own attention a window, in place.

    Args:
        model: whose attention is reached through the library's attention interface.
        window: the tokens that a token sees.
        memories: of the calls, with which a window has no global tokens; None for a model that remembers nothing.
    """

    def pairs(attention_mask: torch.Tensor) -> _Pairs:
        if memories is not None:
            before = memories.given(MASK)
            memories.leave(MASK, remembered(before, attention_mask, text_ends(attention_mask)))
            attention_mask = torch.cat([before, attention_mask], dim=1)
        real = attention_mask.bool()
        return _Pairs(window, real, real & (real.long().cumsum(1) <= window.global_tokens), memories)

    use_pair_counts(model)
    wrap_layers(model, lambda states, mask, layers: layers(states, pairs(mask)))
