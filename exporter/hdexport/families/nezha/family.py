"""NEZHA as a family: attention by clipped distance, and no positions to extend."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.distance.model import attend_by_distance
from hdexport.families.nezha.config import NezhaConfig
from hdexport.families.nezha.model import (
    NezhaForMaskedLM,
    NezhaForQuestionAnswering,
    NezhaForSequenceClassification,
    NezhaForTokenClassification,
    NezhaModel,
    NezhaSelfAttention,
)
from hdexport.families.rembert import query_projections
from hdexport.model.family import Family, ModelClasses, UnsupportedReason
from hdruntime.bundle.manifest import Task


class _SelfAttention(torch.nn.Module):
    """The original's projections and rows around our operator.

    The rows are one buffer of the model, so that a graph has them once.
    """

    def __init__(self, original: NezhaSelfAttention, rows: torch.Tensor) -> None:
        super().__init__()
        self.original = original
        self.original.rows = rows

    def forward(self, hidden_states: torch.Tensor, attention_mask: DenseMask, **_: Any) -> tuple[torch.Tensor, None]:
        query, key, value = self.original.projected(hidden_states)
        rows, scale = self.original.rows.to(query.dtype), query.shape[3] ** -0.5
        attended = attend_by_distance(attention_mask, query, key, value, (query * scale) @ rows.T, rows, scale=scale)
        return attended.flatten(2), None


def _adapt(model: PreTrainedModel) -> None:
    layers: Any = model.base_model.encoder.layer
    rows = layers[0].attention.self.rows
    for layer in layers:
        layer.attention.self = _SelfAttention(layer.attention.self, rows)


FAMILY = Family(
    known_config_keys=frozenset({"use_relative_position"}),
    classes=ModelClasses(
        config=NezhaConfig,
        models={
            Task.FEATURE_EXTRACTION: NezhaModel,
            Task.FILL_MASK: NezhaForMaskedLM,
            Task.TEXT_CLASSIFICATION: NezhaForSequenceClassification,
            Task.TOKEN_CLASSIFICATION: NezhaForTokenClassification,
            Task.QUESTION_ANSWERING: NezhaForQuestionAnswering,
        },
    ),
    learned_positions=False,
    relative_positions=True,
    adapt=_adapt,
    query_projections=query_projections,
    conversion_unsupported_reason=UnsupportedReason.RELATIVE_POSITIONS,
)
