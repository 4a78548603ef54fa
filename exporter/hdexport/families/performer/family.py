"""Performer as a family: attention by random features of the checkpoint, and positions of either kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hdexport.attention.favor import FavorAttention
from hdexport.attention.favor.attention_type import FavorConversion
from hdexport.families.performer.config import PerformerConfig
from hdexport.families.performer.model import EPSILON, PerformerForMaskedLM, PerformerModel
from hdexport.model.family import Family, ModelClasses, NativeAttention, UnsupportedReason
from hdruntime.bundle.manifest import Task


def _adapt(model: PreTrainedModel, conversion: FavorConversion) -> None:
    attending: Any = model
    for attention in attending.attentions():
        attention.record = conversion.record


def _attention(config: Any) -> FavorAttention:
    return FavorAttention(layers=config.depth, features=config.features, seed=None, epsilon=EPSILON)


def _of_config(config: Mapping[str, Any]) -> Family:
    return _ROTARY if config.get("rotary_position_emb", True) else FAMILY


FAMILY = Family(
    of_config=_of_config,
    classes=ModelClasses(
        config=PerformerConfig,
        models={
            Task.FEATURE_EXTRACTION: PerformerModel,
            Task.FILL_MASK: PerformerForMaskedLM,
        },
    ),
    embeddings=lambda model: model.pos_emb,
    positions_key="max_seq_len",
    position_table="pos_emb.emb.weight",
    training_weights=("performer.proj_updater.",),
    native_attention=NativeAttention(attention_type="favor", record=_attention, adapt=_adapt),
    tasks=(Task.FEATURE_EXTRACTION, Task.FILL_MASK),
    task_unsupported_reason=UnsupportedReason.NO_HEAD,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_FEATURES,
)

_ROTARY = dataclasses.replace(
    FAMILY,
    learned_positions=False,
    # Sines, which are stored as they were computed.
    training_weights=(*FAMILY.training_weights, "pos_emb.", "layer_pos_emb."),
)
"""Rotary positions of checkpoints with ``rotary_position_emb``, which PerformerLM has unless told otherwise."""
