"""Transformers' own model with another attention, as a reference: PyTorch's, nothing of ours.

Pairs of tokens are counted, in slices of queries, for sparse attention. Queries grow with the logarithm of the keys
that they see for ``--attention-scale logn``; keys are counted in the mask that each attention is given, and models are
trained with it, too.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdexport.attention.model_parts import use_attention
from hdexport.attention.query_scale import LogScale
from hdexport.model.family import Family

_IMPLEMENTATION = "hdexport-pair-counts"
"""Name under which transformers' attention interface knows it."""

_SLICE_VALUES = 2**22
"""Pairs, times heads, that are looked at at once: 16 MB of each temporary, and not all of [heads, tokens, tokens]."""


class PairCounts(ABC):
    """How often queries see keys: given to every attention of a model in place of a mask."""

    @abstractmethod
    def of_queries(self, module: torch.nn.Module, queries: slice) -> torch.Tensor:
        """[batch, 1 or heads, queries, keys], float, of one layer's attention; 0 for pairs that are not seen."""

    def with_memory(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, [batch, heads, keys, head_dim], earlier calls' keys and values, if any, first."""
        return key, value

    def keys(self) -> torch.Tensor:
        """[batch, 1, 1 or tokens, 1], the keys by which queries are scaled; see `hdexport.attention.query_scale`."""
        raise NotImplementedError


def use_pair_counts(model: PreTrainedModel) -> None:
    """Make a model's own attention, which transformers' interface reaches, one of counted pairs, in place.

    Its layers are to be wrapped (`hdexport.attention.model_parts.wrap_layers`), are given the mask as it is, [batch,
    tokens], and hand on the counts.
    """
    use_attention(model, _IMPLEMENTATION, _attend_pairs)


def _attend_pairs(
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
    key, value = attention_mask.with_memory(key, value)
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


def use_query_scale(model: PreTrainedModel, family: Family, query_scale: LogScale) -> None:
    """Make a model's own attention scale its queries, in place; also one that `use_pair_counts` has changed.

    The model is dense, or has native windows, by PyTorch's scaled_dot_product_attention if transformers has that for
    it. Gradients pass through the factors' products.
    """
    if family.query_projections is not None:
        for attention, projection in family.query_projections(model):
            _scale_projection(attention, projection, query_scale.base)
        return
    before = model.config._attn_implementation
    name = f"{before}-logn-{query_scale.base}"
    attend = functools.partial(_attend_scaled, ALL_ATTENTION_FUNCTIONS[before], query_scale.base)
    use_attention(model, name, attend, ALL_MASK_ATTENTION_FUNCTIONS[before])


def _attend_scaled(
    original: Any,
    base: int,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PairCounts | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """An attention function: another one, of scaled queries."""
    factors = _factors(attention_mask, key.shape[2], base).to(query.device)
    scaled = (query * factors).to(query.dtype)
    return original(module, scaled, key, value, attention_mask, *args, **kwargs)


def _scale_projection(attention: torch.nn.Module, projection: torch.nn.Module, base: int) -> None:
    """Scale the queries that an attention projects, [batch, tokens, hidden]."""
    factors = torch.ones(())
    signature = inspect.signature(attention.forward)

    def look(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal factors
        states, mask = args[0], signature.bind(*args, **kwargs).arguments["attention_mask"]
        factors = _factors(mask, states.shape[1], base)[:, 0].to(states.device)

    attention.register_forward_pre_hook(look, with_kwargs=True)
    projection.register_forward_hook(lambda _, __, query: (query * factors).to(query.dtype))


def _factors(mask: torch.Tensor | PairCounts | None, tokens: int, base: int) -> torch.Tensor:
    """[1 or batch, 1, 1 or tokens, 1], float32, by the keys that are seen.

    Args:
        mask: the mask of an attention function: [batch, 1, queries, keys], True or 0 for keys that are seen; None
            where all of the `tokens` are.
    """
    if mask is None:
        keys = torch.full((1, 1, 1, 1), tokens)
    elif isinstance(mask, PairCounts):
        keys = mask.keys()
    else:
        # Without windows all rows are one row of memory.
        rows = mask[:, :, :1] if mask.stride(2) == 0 else mask
        seen = rows if rows.dtype == torch.bool else rows == 0
        # One factor per text: the factor of queries that no window cuts off at an end.
        keys = seen.sum(-1, keepdim=True).amax(2, keepdim=True)
    return torch.log(keys.float().clamp(min=1)).div(math.log(base)).clamp(min=1)
