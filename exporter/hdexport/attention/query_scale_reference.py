"""The library's own model with queries that grow with the logarithm of the keys they see.

Bundles with ``--attention-scale logn`` are compared with this, and models are trained with it: PyTorch's attention with
other queries, nothing of ours. Keys are counted in the mask that each attention is given.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdexport.attention.pair_counts import PairCounts
from hdexport.model.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdexport.attention.query_scale import LogScale


def use_query_scale(model: PreTrainedModel, family: Family, query_scale: LogScale) -> None:
    """Make a model's own attention scale its queries, in place; also one that `use_pair_counts` has changed.

    The model is dense, or has windows of its own, by PyTorch's scaled_dot_product_attention if the library has that for
    it. Gradients pass through the factors' products.
    """
    if family.query_projections is not None:
        for attention, projection in family.query_projections(model):
            _scale_projection(attention, projection, query_scale.base)
        return
    before = model.config._attn_implementation
    name = f"{before}-logn-{query_scale.base}"
    attend = functools.partial(_attend, ALL_ATTENTION_FUNCTIONS[before], query_scale.base)
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.config._attn_implementation = name


def _attend(
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
        mask: as an attention function is given it: [batch, 1, queries, keys], True or 0 for keys that are seen; None
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
