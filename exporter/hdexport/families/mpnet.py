"""MPNet: RoBERTa's positions, and a learned bias by distance on every layer's scores, the same one for all layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.distance.model import attend_by_distance
from hdexport.model.family import Family, UnsupportedReason

# The model's code fixes the padding row to 1, without regard to the config's pad_token_id.
_PADDING_ROW = 1

_REACH = 128
"""The distance, in tokens, beyond which the model's code tells none apart."""


class _SelfAttention(torch.nn.Module):
    """The projections of the original module around our operator."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = original.q, original.k, original.v, original.o
        self.head_dim = int(original.attention_head_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: DenseMask,
        position_bias: torch.Tensor,  # by distance, [1, 1, heads, 2 * _REACH + 1]
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)  # [batch, tokens, heads, head_dim]
        query, key, value = (project(hidden_states).view(heads) for project in (self.q, self.k, self.v))
        attended = attend_by_distance(attention_mask, query, key, value, position_bias, scale=self.head_dim**-0.5)
        return (self.o(attended.flatten(2)),)


def _position_bias(encoder: Any, buckets: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The bias of each distance, [1, 1, heads, 2 * _REACH + 1], where the original has one for each pair of tokens.

    `buckets`, int64, has the bucket of each distance; the hidden states only tell the device.
    """
    bias: torch.Tensor = encoder.relative_attention_bias(buckets.to(hidden_states.device))
    return bias.T[None, None]


def _adapt(model: PreTrainedModel) -> None:
    encoder = model.base_model.encoder
    for layer in encoder.layer:
        layer.attention.attn = _SelfAttention(layer.attention.attn)
    # The original passes no num_buckets, so its default of 32 holds, even if the config says otherwise; here as well.
    buckets = encoder.relative_position_bucket(torch.arange(-_REACH, _REACH + 1))
    encoder.compute_position_bias = functools.partial(_position_bias, encoder, buckets)


FAMILY = Family(
    padding_row=lambda config: _PADDING_ROW,
    adapt=_adapt,
    query_projections=lambda model: [
        (layer.attention.attn, layer.attention.attn.q) for layer in model.base_model.encoder.layer
    ],
    conversion_unsupported_reason=UnsupportedReason.RELATIVE_POSITIONS,
)
