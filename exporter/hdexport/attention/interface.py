"""Transformers' attention interface, mapped to nodes of our operators while a model is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.model_parts import use_attention
from hdexport.attention.query_scale import LogScale
from hdexport.attention.window import Window
from hdexport.attention.window.model import WindowMask, window_mask

_IMPLEMENTATION = "hdexport"
"""Name under which transformers' attention interface knows us."""


class LayerMask(Protocol):
    """What an attention type gives to the layers of a model in the place of a mask; it computes their attention."""

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer's attention: [batch, tokens, heads, head_dim], contiguous.

        Args:
            module: the layer's attention.
            query: [batch, tokens, heads, head_dim].
            key, value: [batch, tokens, kv_heads, head_dim]; heads is a multiple of kv_heads.
            scale: factor of the scores.
        """
        ...


def use_operators(model: PreTrainedModel, query_scale: LogScale | None = None) -> None:
    """Make every attention of the model, which transformers' attention interface reaches, call our operators, in place.

    Dense attention stays dense, and layers that transformers windows are windowed. A kind that takes the place of dense
    attention wraps the layers (`hdexport.attention.model_parts.wrap_layers`), which it gives a `LayerMask`. What is
    registered here is the same for every model with the same factor of its queries, whose name says it.
    """
    name = _IMPLEMENTATION if query_scale is None else f"{_IMPLEMENTATION}-logn-{query_scale.base}"
    use_attention(model, name, _attend, functools.partial(_mask, query_scale=query_scale))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LayerMask,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Turned by rotary tables, queries and keys are in float32.
    query, key, value = (state.transpose(1, 2).to(value.dtype) for state in (query, key, value))
    return attention_mask.attend(module, query, key, value, scale), None


def _mask(
    *_: Any,
    attention_mask: torch.Tensor,
    query_scale: LogScale | None,
    mask_function: Callable[..., Any] | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    **__: Any,
) -> DenseMask | WindowMask:
    """Pass on the [batch, tokens] mask, or kinds of tokens: no [tokens, tokens] mask is ever made.

    Args:
        attention_mask: [batch, tokens], bool, True for real tokens.
        query_scale: factor of the queries; None for none.
        mask_function: transformers' definition of which tokens see each other.
        local_size: transformers' word for layers whose own attention is windowed: the farthest token that one sees, on
            each side. (What such layers hand to the attention itself as ``sliding_window`` is one more.) In causal
            layers it counts the token itself, and those before it.
        allow_is_bidirectional_skip: transformers gives it for bidirectional masks alone; mask functions of windows
            cannot be compared, since each call makes another.
    """
    if local_size is None:
        causal = mask_function is causal_mask_function
        assert not causal or query_scale is None, "families whose tokens see different numbers of keys reject a factor"
        factors = None if query_scale is None else query_scale.for_mask(attention_mask)
        return DenseMask(attention_mask, factors, causal=causal)
    window = Window(tokens=local_size, global_tokens=0, dilation=(1,))
    if mask_function is not None and allow_is_bidirectional_skip is None:
        window = Window(tokens=local_size - 1, right=0, global_tokens=0, dilation=(1,))
    return window_mask(window, attention_mask, query_scale)
