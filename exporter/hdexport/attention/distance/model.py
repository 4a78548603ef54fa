"""Attention by clipped distance in a traced model: the operator's node, and how models attend by it."""

from __future__ import annotations

__all__ = ["attend_by_distance", "clipped_distance_node"]

import torch

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.query_scale import scaled
from hdexport.attention.symbolic import operator_node
from hdplugins.attention.distance.reference import clipped_distance_attention


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
    """[batch, tokens, heads, head_dim]; arguments as `clipped_distance_node` has them.

    Args:
        mask: shared by the layers; its factor, if there is one, is of the products of queries and keys.
        query, key, value, scores_by_distance, values_by_distance, scale: as described there.
    """
    query = scaled(query, mask.query_scale)
    attended = clipped_distance_node(
        query, key, value, mask.key_mask, scores_by_distance, values_by_distance, scale=scale
    )
    return attended.transpose(1, 2).contiguous()


def clipped_distance_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    scores_by_distance: torch.Tensor,
    values_by_distance: torch.Tensor | None = None,
    *,
    scale: float,
) -> torch.Tensor:
    """One ``ClippedDistanceAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query, key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key_mask: [batch, tokens], bool, True for real tokens.
        scores_by_distance: [1 or batch, heads, 1 or tokens, 2 * reach + 1].
        values_by_distance: [2 * reach + 1, head_dim]; None for none.
        scale: factor of the products of queries and keys.
    """
    attributes = {"reach": (scores_by_distance.shape[3] - 1) // 2, "scale": float(scale)}
    inputs = [query, key, value, key_mask, scores_by_distance]
    if values_by_distance is not None:
        inputs.append(values_by_distance)
    if not torch.compiler.is_exporting():
        return clipped_distance_attention(*inputs, **attributes)  # type: ignore[arg-type]
    return operator_node("ClippedDistanceAttention", inputs, attributes)
