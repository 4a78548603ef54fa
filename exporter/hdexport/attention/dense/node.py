"""Dense attention in a traced model: the operator's node."""

from __future__ import annotations

__all__ = ["dense_attention_node"]

import torch

from hdexport.attention.symbolic import operator_node
from hdplugins.operators.dense_attention.reference import dense_attention


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
        query, key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key_mask: [batch, tokens], bool, True for real tokens.
        bias: [1 or batch, heads, tokens, tokens].
        scale: factor of the scores.
    """
    if not torch.compiler.is_exporting():
        return dense_attention(query, key, value, key_mask, bias, scale=scale)
    inputs = (query, key, value, key_mask) if bias is None else (query, key, value, key_mask, bias)
    return operator_node("DenseAttention", inputs, {"scale": float(scale)})
