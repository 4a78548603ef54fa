"""The semantics of dense attention, in plain PyTorch."""

from __future__ import annotations

import torch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    scale: float,
    causal: int = 0,
) -> torch.Tensor:
    """Softmax attention over the keys that are not padding.

    A row without a single real key has no distribution to draw from: its result is 0 by definition. Where attention is
    causal, so are the rows of padding.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key: [batch, tokens, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`, and head h of the queries sees
            head h // (heads // kv_heads) of the keys.
        value: [batch, tokens, kv_heads, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        scale: factor of the scores, usually head_dim ** -0.5.
        causal: 1 where a token sees the real tokens up to itself, padding before and between them left out; 0 where it
            sees all of them.
    """
    batch, tokens, heads, _ = query.shape
    kv_heads = key.shape[2]
    grouped = query.unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bikgd,bjkd->bkgij", grouped, key) * scale
    seen = key_mask[:, None, :].expand(batch, tokens, tokens)
    if causal:
        earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        seen = seen & earlier & key_mask[:, :, None]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    # Rows that see no key are -inf throughout, and their softmax is NaN: those are the rows defined as 0.
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    return torch.einsum("bkgij,bjkd->bikgd", weights, value).flatten(2, 3)
