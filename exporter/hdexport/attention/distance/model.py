"""Attention by clipped distance in a traced model."""

from __future__ import annotations

import torch

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.model_parts import operator_node
from hdexport.attention.query_scale import scaled


def attend_by_distance(
    mask: DenseMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores_by_distance: torch.Tensor,
    values_by_distance: torch.Tensor | None = None,
    *,
    scale: float,
) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] of one ``ClippedDistanceAttention`` node; see `operator_node`.

    Args:
        mask: shared by the layers; its factor, if there is one, is of the products of queries and keys.
        query, key, value: [batch, tokens, heads, head_dim].
        scores_by_distance: [1 or batch, 1 or tokens, heads, 2 * reach + 1].
        values_by_distance: [2 * reach + 1, head_dim]; None for none.
        scale: factor of the products of queries and keys.
    """
    inputs = [scaled(query, mask.query_scale), key, value, mask.key_mask, scores_by_distance]
    if values_by_distance is not None:
        inputs.append(values_by_distance)
    attributes = {"reach": (scores_by_distance.shape[3] - 1) // 2, "scale": float(scale)}
    return operator_node("ClippedDistanceAttention", inputs, attributes).contiguous()
