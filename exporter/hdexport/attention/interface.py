"""The library's attention interface, mapped to nodes of our operators while a model is traced."""

from __future__ import annotations

__all__ = ["LayerMask", "use_operators"]

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdexport.attention.dense.node import dense_attention_node
from hdexport.attention.window.node import WindowMask, window_mask
from hdexport.attention.window.record import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMPLEMENTATION = "hdexport"
"""Name under which the library's attention interface knows us."""


class LayerMask(Protocol):
    """What a kind of attention hands to the layers of a model in place of a mask: it attends itself."""

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            module: the layer's attention.
            query, key, value: [batch, heads, tokens, head_dim].
            scale: factor of the scores.

        Returns:
            [batch, tokens, heads, head_dim], contiguous.
        """
        ...


def use_operators(model: PreTrainedModel) -> None:
    """Make every attention of the model call our operators, in place.

    Dense attention stays dense, and layers that the library windows are windowed. A kind that takes the place of dense
    attention wraps the layers (`hdexport.attention.model_parts.wrap_layers`), which it gives a `LayerMask`. What is
    registered here is the same for every model.

    Args:
        model: a model whose attention is reached through the library's attention interface.
    """
    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _mask)
    model.config._attn_implementation = _IMPLEMENTATION


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | LayerMask,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(attention_mask, torch.Tensor):
        return attention_mask.attend(module, query, key, value, scale), None
    attended = dense_attention_node(query, key, value, attention_mask, scale=scale)
    return attended.transpose(1, 2).contiguous(), None


def _mask(*_: Any, attention_mask: torch.Tensor, local_size: int | None = None, **__: Any) -> torch.Tensor | WindowMask:
    """Pass on the [batch, tokens] mask, or kinds of tokens: no [tokens, tokens] mask is ever made.

    Args:
        attention_mask: [batch, tokens], bool, True for real tokens.
        local_size: the library's word for layers whose own attention is windowed: the farthest token that one sees,
            on each side. (What such layers hand to the attention itself as ``sliding_window`` is one more.)
    """
    if local_size is None:
        return attention_mask
    return window_mask(Window(tokens=local_size, global_tokens=0, dilation=(1,)), attention_mask)
