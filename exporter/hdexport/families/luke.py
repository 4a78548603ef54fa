"""LUKE: RoBERTa's positions, and attention in code of its own, which reads the words of a text and no entities."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.dense.model import DenseMask
from hdexport.families.rembert import RemBertAttention, query_projections
from hdexport.model.family import Family, UnsupportedReason


class _WordAttention(RemBertAttention):
    """LUKE's attention among words, whose layers hand on the entities: none."""

    def forward(  # type: ignore[override]
        self, words: torch.Tensor, entities: None, attention_mask: DenseMask, *_: Any
    ) -> tuple[torch.Tensor, None]:
        return super().forward(words, attention_mask)


def _adapt(model: PreTrainedModel) -> None:
    for layer in model.base_model.encoder.layer:
        layer.attention.self = _WordAttention(layer.attention.self)


FAMILY = Family(
    padding_row=lambda config: int(config.pad_token_id),
    adapt=_adapt,
    query_projections=query_projections,
    conversion_unsupported_reason=UnsupportedReason.OWN_ATTENTION_CODE,
)
