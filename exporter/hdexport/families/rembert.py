"""RemBERT and Megatron-BERT: BERT's positions, and BERT's attention in code of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.interface import LayerMask
from hdexport.model.family import Family, UnsupportedReason


class RemBertAttention(torch.nn.Module):
    """The projections ``query``, ``key`` and ``value``, as BERT's attention has them, around our operator."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = original.query, original.key, original.value
        self.head_dim = int(original.attention_head_size)

    def forward(self, hidden_states: torch.Tensor, attention_mask: LayerMask, **_: Any) -> tuple[torch.Tensor, None]:
        """[batch, tokens, width], and no weights."""
        query, key, value = (
            project(hidden_states).unflatten(2, (-1, self.head_dim)) for project in (self.query, self.key, self.value)
        )
        return attention_mask.attend(self, query, key, value, self.head_dim**-0.5).flatten(2), None


def _adapt(model: PreTrainedModel) -> None:
    for layer in model.base_model.encoder.layer:
        layer.attention.self = RemBertAttention(layer.attention.self)


def query_projections(model: PreTrainedModel) -> Sequence[tuple[torch.nn.Module, torch.nn.Module]]:
    """Each layer's attention, and its projection of queries."""
    return [(layer.attention.self, layer.attention.self.query) for layer in model.base_model.encoder.layer]


FAMILY = Family(
    adapt=_adapt,
    query_projections=query_projections,
    conversion_unsupported_reason=UnsupportedReason.OWN_ATTENTION_CODE,
)
