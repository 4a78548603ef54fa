"""RoFormer: BERT with rotary positions, from a table of sines that grows with the longest input.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.dense.model import DenseMask
from hdexport.families.rembert import query_projections
from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.rotary import RotaryTable, rotated

_BASE = 10000.0
"""Base of the angles: position p turns the i-th pair of a head's numbers by p * base^(-2i / head_dim)."""


class _SharedTable(torch.nn.Module):
    """The table in place of transformers' embedding of positions."""

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, shape: torch.Size, past_key_values_length: int = 0) -> torch.Tensor:
        """[tokens, 2 head_dim], sines and then cosines of all of a head, for states of the shape [batch, tokens]."""
        cosines, sines = self.table(shape[1])
        return torch.cat([sines, sines, cosines, cosines], dim=1)


class _SelfAttention(torch.nn.Module):
    """The original's projections around our operator; pairs that turn together are half a head apart.

    In the original they are neighbours, which costs a graph strided copies of queries and keys. The order of a head's
    numbers is the same in both, so their products do not depend on it. Values that turn are put back in order.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.heads, self.head_dim = original.num_attention_heads, original.attention_head_size
        pairs = torch.arange(self.head_dim).view(-1, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
        rows = (torch.arange(self.heads)[:, None] * self.head_dim + pairs).flatten()
        self.query, self.key = _with_rows(original.query, rows), _with_rows(original.key, rows)
        self.turns_values = bool(original.rotary_value)
        self.value = _with_rows(original.value, rows) if self.turns_values else original.value

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: DenseMask,
        sinusoidal_pos: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = (
            project(hidden_states).unflatten(2, (self.heads, self.head_dim))
            for project in (self.query, self.key, self.value)
        )
        sine, cosine = sinusoidal_pos.squeeze(1).unsqueeze(2).chunk(2, dim=-1)  # [1, tokens, 1, head_dim]
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        if self.turns_values:
            value = rotated(value, cosine, sine).unflatten(3, (2, -1)).transpose(3, 4).flatten(3)
        attended = attention_mask.attend(self, query, key, value, self.head_dim**-0.5)
        return attended.flatten(2), None


def _with_rows(linear: torch.nn.Linear, rows: torch.Tensor) -> torch.nn.Linear:
    """A projection whose outputs are in another order."""
    result = torch.nn.Linear(1, 1)
    result.weight = torch.nn.Parameter(linear.weight.detach()[rows])
    result.bias = torch.nn.Parameter(linear.bias.detach()[rows])
    return result


def _adapt(model: PreTrainedModel) -> None:
    encoder: Any = model.base_model.encoder
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    frequencies = _BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    encoder.embed_positions = _SharedTable(RotaryTable(frequencies, config.max_position_embeddings))
    for layer in encoder.layer:
        layer.attention.self = _SelfAttention(layer.attention.self)


def _as_trained(model: PreTrainedModel) -> None:
    """Transformers' own table, for as many positions as the configuration has by now."""
    encoder: Any = model.base_model.encoder
    width = encoder.embed_positions.weight.shape[1]
    table = type(encoder.embed_positions)(model.config.max_position_embeddings, width)
    table.weight = torch.nn.Parameter(table.create_weight(), requires_grad=False)
    encoder.embed_positions = table


FAMILY = Family(
    learned_positions=False,
    adapt=_adapt,
    as_trained=_as_trained,
    query_projections=query_projections,
    conversion_unsupported_reason=UnsupportedReason.OWN_ATTENTION_CODE,
)
