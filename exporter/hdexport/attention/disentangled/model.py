"""Disentangled attention in a traced model."""

from __future__ import annotations

import torch

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.model_parts import operator_node
from hdexport.attention.query_scale import scaled


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
    """[batch, tokens, heads, head_dim] of one ``DisentangledAttention`` node; see `operator_node`.

    Args:
        mask: shared by the layers; its factor, if there is one, is of the queries.
        query, key, value: [batch, tokens, heads, head_dim].
        position_keys, position_queries: [heads, rows, head_dim].
        row_of_distance: [2 * reach + 1], int64, of a key's distance from the query.
    """
    query = scaled(query, mask.query_scale)
    inputs = (query, key, value, mask.key_mask, position_keys, position_queries, row_of_distance)
    attributes = {"reach": row_of_distance.shape[0] // 2, "scale": float(scale)}
    return operator_node("DisentangledAttention", inputs, attributes).contiguous()
