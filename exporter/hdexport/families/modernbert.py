"""ModernBERT: rotary positions, and windows around each token in most layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import ModernBertForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.rotary import use_rotary_tables


def classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A classifier's forward pass: its pooling in float32, and of real tokens only.

    The original sums thousands of tokens in the type of the model. As the first token it takes the token at index 0:
    with padding on the left that is padding, and its row differs between transformers' implementations of attention.
    """
    hidden_states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    pooled = attention_mask
    if model.config.classifier_pooling == "cls":
        pooled = attention_mask * (attention_mask.cumsum(1) == 1)
    pooled_states = mean(hidden_states, pooled).to(hidden_states.dtype)
    return SequenceClassifierOutput(logits=model.classifier(model.head(pooled_states)))


def mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the tokens of [batch, tokens, width] with 1 in a mask [batch, tokens]: [batch, width], float32."""
    weights = mask[..., None].float()
    return (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)


def _adapt(model: PreTrainedModel) -> None:
    use_rotary_tables(model)
    if isinstance(model, ModernBertForSequenceClassification):
        model.forward = functools.partial(classify, model)


FAMILY = Family(
    # Beside norm_eps, which is read.
    known_config_keys=frozenset({"layer_norm_eps"}),
    learned_positions=False,
    scales_rope=True,
    adapt=_adapt,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_WINDOWS,
)
