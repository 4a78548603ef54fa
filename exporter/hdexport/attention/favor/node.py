"""FAVOR+ in a traced model: the operator's node, and the mask that converted layers share."""

from __future__ import annotations

__all__ = ["FavorMask", "favor_node"]

from dataclasses import dataclass

import torch

from hdexport.attention.favor.record import FavorAttention
from hdexport.attention.query_scale import scaled
from hdexport.attention.symbolic import operator_node
from hdplugins.attention.favor.reference import favor_attention


def favor_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    projection: torch.Tensor,
    *,
    record: FavorAttention,
    scale: float,
) -> torch.Tensor:
    """One ``FavorAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query, key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key_mask: [batch, tokens], bool, True for real tokens.
        projection: [features, head_dim], float32.
        record: the attention.
        scale: factor of the products of queries and keys.
    """
    features, epsilon, compat = projection.shape[0], record.epsilon, int(record.compat)
    if not torch.compiler.is_exporting():
        return favor_attention(
            query, key, value, key_mask, projection, features=features, scale=scale, epsilon=epsilon, compat=compat
        )
    attributes = {"features": features, "scale": float(scale), "epsilon": epsilon, "compat": compat}
    return operator_node("FavorAttention", (query, key, value, key_mask, projection), attributes)


@dataclass(frozen=True)
class FavorMask:
    """The mask of layers whose dense attention became FAVOR+.

    Attributes:
        record: the attention.
        key_mask: [batch, tokens], bool, True for real tokens.
        projection: [features, head_dim], float32.
        query_scale: [batch, 1, 1, 1], float32, factors of the queries; None for none.
    """

    record: FavorAttention
    key_mask: torch.Tensor
    projection: torch.Tensor
    query_scale: torch.Tensor | None = None

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`."""
        query = scaled(query, self.query_scale)
        attended = favor_node(query, key, value, self.key_mask, self.projection, record=self.record, scale=scale)
        return attended.transpose(1, 2).contiguous()
