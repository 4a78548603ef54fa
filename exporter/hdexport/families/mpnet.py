"""MPNet: RoBERTa's positions, and a bias of relative distance on every layer's scores."""

from __future__ import annotations

__all__ = ["FAMILY"]

import functools
from typing import TYPE_CHECKING, Any

import torch

from hdexport.attention.dense.node import DenseMask
from hdexport.model.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The model's code fixes the padding row to 1, whatever the config's pad_token_id.
_PADDING_ROW = 1


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
        position_bias: torch.Tensor,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)  # [batch, tokens, heads, head_dim]
        query, key, value = (project(hidden_states).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        attended = attention_mask.attend(self, query, key, value, self.head_dim**-0.5, bias=position_bias)
        return (self.o(attended.flatten(2)),)


def _position_bias(encoder: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The bias of relative distance, [1, heads, tokens, tokens]: one for the batch, where the original repeats it."""
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    # The original passes no num_buckets, so its default of 32 holds whatever the config says; here as well.
    buckets = encoder.relative_position_bucket(positions[None, :] - positions[:, None])
    bias: torch.Tensor = encoder.relative_attention_bias(buckets)
    return bias.permute(2, 0, 1).unsqueeze(0)


def _adapt(model: PreTrainedModel) -> None:
    encoder = model.base_model.encoder
    for layer in encoder.layer:
        layer.attention.attn = _SelfAttention(layer.attention.attn)
    encoder.compute_position_bias = functools.partial(_position_bias, encoder)


FAMILY = Family(
    model_types=("mpnet",),
    padding_row=lambda config: _PADDING_ROW,
    adapt=_adapt,
    has_sdpa=False,
    query_projections=lambda model: [
        (layer.attention.attn, layer.attention.attn.q) for layer in model.base_model.encoder.layer
    ],
    why_not_converted="its scores have a bias for every pair of tokens",
)
