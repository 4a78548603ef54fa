"""The library's attention interface, mapped to nodes of our operators while a model is traced."""

from __future__ import annotations

__all__ = ["dense_attention_node", "use_operators"]

from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION
from hdplugins.dense_attention.reference import dense_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMPLEMENTATION = "hdexport"
"""Name under which the library's attention interface knows us."""


def use_operators(model: PreTrainedModel) -> None:
    """Make every attention of the model call our operators, in place."""
    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _mask_interface)
    model.config._attn_implementation = _IMPLEMENTATION


def dense_attention_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float,
) -> torch.Tensor:
    """One ``DenseAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key: [batch, heads, tokens, head_dim].
        value: [batch, heads, tokens, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        bias: [1 or batch, heads, tokens, tokens].
        scale: factor of the scores.
    """
    if not torch.compiler.is_exporting():
        return dense_attention(query, key, value, key_mask, bias, scale=scale)
    inputs = (query, key, value, key_mask) if bias is None else (query, key, value, key_mask, bias)
    return torch.onnx.ops.symbolic(
        f"{ONNX_DOMAIN}::DenseAttention",
        inputs,
        attrs={"scale": float(scale)},
        dtype=query.dtype,
        shape=query.shape,
        version=ONNX_DOMAIN_VERSION,
    )


def _attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = dense_attention_node(query, key, value, attention_mask, scale=scale)
    return attended.transpose(1, 2).contiguous(), None


def _mask_interface(*_: Any, attention_mask: torch.Tensor, **__: Any) -> torch.Tensor:
    """Hand the [batch, tokens] mask on as it is: no [tokens, tokens] mask is ever made."""
    return attention_mask
