"""The semantics of dense attention, in plain PyTorch."""

from __future__ import annotations

__all__ = ["dense_attention"]

import torch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Softmax attention over the keys that are not padding.

    A row without a single real key has no distribution to draw from: its result is 0 by definition.

    Args:
        query: [batch, heads, tokens, head_dim], any float dtype; the result has the same shape and dtype.
        key: [batch, heads, tokens, head_dim].
        value: [batch, heads, tokens, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        scale: factor of the scores, usually head_dim ** -0.5.
    """
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * scale
    scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    # Rows that see no key are -inf throughout, and their softmax is NaN: those are the rows defined as 0.
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    return torch.einsum("bhij,bhjd->bhid", weights, value)
