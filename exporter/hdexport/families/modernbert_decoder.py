"""ModernBERT's decoder, as an encoder: causal attention, in most layers of a window of earlier tokens.

``local_attention`` is twice the window, which holds the token itself: a token sees one token less before it than one of
a ModernBERT sees on each side.

Source: Weller et al., "Seq vs Seq: An Open Suite of Paired Encoders and Decoders" (2025), of Ettin's decoders.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import ModernBertDecoderForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hdexport.families.qwen3 import last_read
from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.rotary import use_rotary_tables
from hdruntime.bundle.manifest import Task


def _classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A classifier's forward pass, of one token of each text, which it reads as Qwen3's does."""
    states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    last = last_read(states, input_ids, attention_mask, model.config.pad_token_id)
    return SequenceClassifierOutput(logits=model.classifier(model.head(last)))


def _adapt(model: PreTrainedModel) -> None:
    model.config.use_cache = False
    use_rotary_tables(model)
    if isinstance(model, ModernBertDecoderForSequenceClassification):
        model.forward = functools.partial(_classify, model)


FAMILY = Family(
    tasks=(Task.FEATURE_EXTRACTION, Task.TEXT_CLASSIFICATION),
    task_unsupported_reason=UnsupportedReason.CAUSAL_TASK,
    # Beside norm_eps, which is read.
    known_config_keys=frozenset({"layer_norm_eps"}),
    learned_positions=False,
    is_causal=True,
    scales_rope=True,
    training_weights=("lm_head.",),
    embeddings=lambda model: model.base_model.embeddings,
    adapt=_adapt,
    classifies_first=False,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_WINDOWS,
)
