"""Dense attention in a traced model: the operator's node, and the mask that dense layers share."""

from __future__ import annotations

__all__ = ["DenseMask", "dense_attention_node"]

from dataclasses import dataclass

import torch

from hdexport.attention.query_scale import scaled
from hdexport.attention.symbolic import operator_node
from hdplugins.attention.dense.reference import dense_attention


@dataclass(frozen=True)
class DenseMask:
    """The values that dense layers share: made once, handed from layer to layer as the library's mask is.

    Attributes:
        key_mask: [batch, tokens], bool, True for real tokens.
        query_scale: [batch, 1, 1, 1], float32, factors of the queries; None for none.
        causal: whether a token sees only tokens up to itself.
    """

    key_mask: torch.Tensor
    query_scale: torch.Tensor | None = None
    causal: bool = False

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`.

        Args:
            module, query, key, value, scale: as described there.
        """
        query = scaled(query, self.query_scale)
        attended = dense_attention_node(query, key, value, self.key_mask, scale=scale, causal=self.causal)
        return attended.transpose(1, 2).contiguous()


def dense_attention_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
) -> torch.Tensor:
    """One ``DenseAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key, value: [batch, kv_heads, tokens, head_dim]; heads is a multiple of kv_heads.
        key_mask: [batch, tokens], bool, True for real tokens.
        scale: factor of the scores.
        causal: whether a token sees only tokens up to itself.
    """
    if not torch.compiler.is_exporting():
        return dense_attention(query, key, value, key_mask, scale=scale, causal=int(causal))
    attributes = {"scale": float(scale), "causal": int(causal)}
    return operator_node("DenseAttention", (query, key, value, key_mask), attributes)
