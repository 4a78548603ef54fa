"""Dense attention in a traced model: the mask that dense layers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdexport.attention.model_parts import operator_node
from hdexport.attention.query_scale import scaled


@dataclass(frozen=True)
class DenseMask:
    """The values that dense layers share: made once, handed from layer to layer as transformers' mask is.

    Attributes:
        key_mask: [batch, tokens], bool, True for real tokens.
        query_scale: [batch, 1, 1, 1], float32, factors of the queries; None for none.
        causal: whether a token sees only tokens up to itself.
    """

    key_mask: torch.Tensor
    query_scale: torch.Tensor | None = None
    causal: bool = False

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim], of one ``DenseAttention`` node; see `LayerMask` and `operator_node`."""
        inputs = (scaled(query, self.query_scale), key, value, self.key_mask)
        attributes = {"scale": float(scale), "causal": int(self.causal)}
        return operator_node("DenseAttention", inputs, attributes).contiguous()
