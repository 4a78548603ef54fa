"""Qwen3 as an encoder: causal attention in heads that share keys, for embedders and rerankers.

A text's vector is its last token's, which sees all others. Positions are rotary, so that answers depend on
distances alone: padding may be on either side. (Without ids, transformers counts positions from index 0, padding
included, and not from the first real token.) There is no cache: a text is read in one pass.

Source: Zhang et al., "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation Models" (2025).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3ForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.half_precision import use_root_mean_squares
from hdexport.model.rotary import use_rotary_tables
from hdruntime.bundle.manifest import Task


def last_read(
    states: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor, padding_id: int | None
) -> torch.Tensor:
    """The vector that transformers' causal classifiers read of states, [batch, tokens, hidden_size]: [batch,
    hidden_size].

    As there it is that of the last token whose id is not padding's; here that must be real as well, with any id of
    padding.
    """
    read = attention_mask
    if padding_id is not None:
        read = attention_mask * (input_ids != padding_id)
    last = (read * torch.arange(read.shape[1], device=read.device)).argmax(1)  # [batch]
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


def _classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A classifier's forward pass, of one token of each text."""
    states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    last = last_read(states, input_ids, attention_mask, model.config.pad_token_id)
    return SequenceClassifierOutput(logits=model.score(last))


def _adapt(model: PreTrainedModel) -> None:
    model.config.use_cache = False
    use_rotary_tables(model)
    use_root_mean_squares(model)
    if isinstance(model, Qwen3ForSequenceClassification):
        model.forward = functools.partial(_classify, model)


FAMILY = Family(
    tasks=(
        Task.FEATURE_EXTRACTION,
        Task.TEXT_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
    ),
    task_unsupported_reason=UnsupportedReason.CAUSAL_TASK,
    learned_positions=False,
    is_causal=True,
    scales_rope=True,
    training_weights=("lm_head.",),
    embeddings=lambda model: model.base_model,
    adapt=_adapt,
    classifies_first=False,
    conversion_unsupported_reason=UnsupportedReason.CAUSAL,
)
