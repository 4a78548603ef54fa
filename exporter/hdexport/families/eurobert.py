"""EuroBERT: rotary positions, normalisation by the root mean square, and heads that share keys.

Source: Boizard et al., "EuroBERT: Scaling Multilingual Encoders for European Languages" (2025).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import EuroBertForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hdexport.families.modernbert import mean
from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.half_precision import use_root_mean_squares
from hdexport.model.rotary import use_rotary_tables

_POOLING = "clf_pooling"
"""The published checkpoints' key of a classifier's pooling, which transformers passes over."""


def _classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A classifier's forward pass: its pooling in float32, and of real tokens only.

    The original takes the token at index 0, padding or not, for the first token, and sums in the type of the model.
    ``late`` pools the classifier's results for each token, the others the classifier's inputs.
    """
    states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    if model.classifier_pooling == "late":
        logits = model.classifier(model.activation(model.dense(states)))
        return SequenceClassifierOutput(logits=mean(logits, attention_mask))
    pooled = attention_mask
    if model.classifier_pooling == "bos":
        pooled = attention_mask * (attention_mask.cumsum(1) == 1)
    pooled_states = mean(states, pooled).to(states.dtype)
    return SequenceClassifierOutput(logits=model.classifier(model.activation(model.dense(pooled_states))))


def _adapt(model: PreTrainedModel) -> None:
    use_rotary_tables(model)
    use_root_mean_squares(model)
    if isinstance(model, EuroBertForSequenceClassification):
        model.forward = functools.partial(_classify, model)


def _config_overrides(config: Mapping[str, Any]) -> Mapping[str, Any]:
    named = config.get("classifier_pooling", config.get(_POOLING))
    return {} if named is None else {"classifier_pooling": named}


FAMILY = Family(
    config_overrides=_config_overrides,
    known_config_keys=frozenset({_POOLING, "pretraining_tp"}),
    learned_positions=False,
    scales_rope=True,
    embeddings=lambda model: model.base_model,
    adapt=_adapt,
    conversion_unsupported_reason=UnsupportedReason.NO_STACK_OF_LAYERS,
)
