"""PyTorch's attention with a count for every pair of tokens, in slices of queries: a reference for sparse attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMPLEMENTATION = "hdexport-pair-counts"
"""Name under which the library's attention interface knows it."""

_SLICE_VALUES = 2**22
"""Pairs, times heads, that are looked at at once: 16 MB of each temporary, and not all of [heads, tokens, tokens]."""


class PairCounts(ABC):
    """How often queries see keys: given to every attention of a model in place of a mask."""

    @abstractmethod
    def of_queries(self, module: torch.nn.Module, queries: slice) -> torch.Tensor:
        """[batch, 1 or heads, queries, keys], float, of one layer's attention; 0 for pairs that are not seen."""

    def with_carried(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, [batch, heads, keys, head_dim], earlier calls' keys and values, if any, first."""
        return key, value

    def keys(self) -> torch.Tensor:
        """[batch, 1, 1 or tokens, 1], the keys by which queries are scaled; see `hdexport.attention.query_scale`."""
        raise NotImplementedError


def use_pair_counts(model: PreTrainedModel) -> None:
    """Make a model's own attention, which the library's interface reaches, one of counted pairs, in place.

    Its layers are to be wrapped (`hdexport.attention.model_parts.wrap_layers`), are given the mask as it is, [batch,
    tokens], and hand on the counts.
    """
    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, lambda *_, attention_mask, **__: attention_mask)
    model.config._attn_implementation = _IMPLEMENTATION


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PairCounts,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: a key that is seen m times counts as m equal keys, a query that sees none gives 0.

    Args:
        query, key, value: [batch, heads, tokens, head_dim]; the result is [batch, tokens, heads, head_dim].
        attention_mask: how often each query sees each key.
        scaling: factor of the scores; None for head_dim ** -0.5.
    """
    key, value = attention_mask.with_carried(key, value)
    batch, heads, tokens, _head_dim = query.shape
    step = max(1, _SLICE_VALUES // (batch * heads * key.shape[2]))
    parts = []
    for first in range(0, tokens, step):
        queries = slice(first, min(first + step, tokens))
        times = attention_mask.of_queries(module, queries)
        seen = times.sum(-1, keepdim=True) > 0
        bias = torch.where(seen, times.log(), 0.0)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, queries], key, value, attn_mask=bias, scale=scaling
        )
        parts.append(attended * seen)
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None
