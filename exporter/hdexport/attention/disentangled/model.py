"""Disentangled attention in a traced model: the operator's node, and how models attend by it."""

from __future__ import annotations

__all__ = ["attend_disentangled", "disentangled_node"]

import torch

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.query_scale import scaled
from hdexport.attention.symbolic import operator_node
from hdplugins.attention.disentangled.reference import disentangled_attention


def attend_disentangled(
    mask: DenseMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_keys: torch.Tensor,
    position_queries: torch.Tensor,
    row_of_distance: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """[batch, tokens, heads, head_dim]; arguments as `disentangled_node` has them.

    Args:
        mask: shared by the layers; its factor, if there is one, is of the queries.
        query, key, value, position_keys, position_queries, row_of_distance, scale: as described there.
    """
    query = scaled(query, mask.query_scale)
    attended = disentangled_node(
        query, key, value, mask.key_mask, position_keys, position_queries, row_of_distance, scale=scale
    )
    return attended.transpose(1, 2).contiguous()


def disentangled_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    position_keys: torch.Tensor,
    position_queries: torch.Tensor,
    row_of_distance: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """One ``DisentangledAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query, key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key_mask: [batch, tokens], bool, True for real tokens.
        position_keys, position_queries: [heads, rows, head_dim].
        row_of_distance: [2 * reach + 1], int64, of a key's distance from the query.
        scale: factor of the scores.
    """
    attributes = {"reach": row_of_distance.shape[0] // 2, "scale": float(scale)}
    inputs = (query, key, value, key_mask, position_keys, position_queries, row_of_distance)
    if not torch.compiler.is_exporting():
        return disentangled_attention(*inputs, **attributes)  # type: ignore[arg-type]
    return operator_node("DisentangledAttention", inputs, attributes)
