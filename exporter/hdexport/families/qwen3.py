"""Qwen3 as an encoder: causal attention in heads that share keys, for embedders and rerankers.

A text's vector is its last token's, which sees all others. Positions are rotary, so that answers depend on
distances alone: padding may be on either side. (Without ids, transformers counts positions from index 0, padding
included, and not from the first real token.) There is no cache: a text is read in one pass.

Source: Zhang et al., "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation Models" (2025).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from hdexport.model.family import Family
from hdexport.model.half_precision import use_root_mean_squares
from hdexport.model.rotary import use_rotary_tables
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A classifier's forward pass, of one token of each text.

    As in the original that is the last token whose id is not padding's; here it must be real as well, with any id of
    padding.
    """
    from transformers.modeling_outputs import SequenceClassifierOutput

    states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    read, padding_id = attention_mask, model.config.pad_token_id
    if padding_id is not None:
        read = attention_mask * (input_ids != padding_id)
    last = (read * torch.arange(read.shape[1], device=read.device)).argmax(1)  # [batch]
    index = last[:, None, None].expand(-1, 1, states.shape[-1])
    return SequenceClassifierOutput(logits=model.score(states.gather(1, index).squeeze(1)))


def _adapt(model: PreTrainedModel) -> None:
    from transformers import Qwen3ForSequenceClassification

    if "sliding_attention" in model.config.layer_types:
        raise ModelError(
            "This qwen3 has layers whose tokens see a window of earlier tokens, which no checkpoint of the family that "
            "is published for embeddings has: its config.json has use_sliding_window.\n"
            "Set use_sliding_window to false and layer_types to full_attention, if it was trained so."
        )
    model.config.use_cache = False
    use_rotary_tables(model)
    use_root_mean_squares(model)
    if isinstance(model, Qwen3ForSequenceClassification):
        model.forward = functools.partial(_classify, model)


class _Qwen3(Family):
    """Tokens see different numbers of keys."""

    why_not_scaled = "each of its tokens sees one key more than the one before, and the factor is one for a text"


FAMILY = _Qwen3(
    model_types=("qwen3",),
    tasks=(
        Task.FEATURE_EXTRACTION,
        Task.TEXT_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
    ),
    why_not_other_tasks="is for a model that sees the tokens after a token as well, or that generates text",
    learned_positions=False,
    is_causal=True,
    stretches_rotary=True,
    training_weights=("lm_head.",),
    embeddings=lambda model: model.base_model,
    adapt=_adapt,
    classifies_first=False,
    why_not_converted="its tokens see earlier tokens only, and other attention sees both sides",
    why_not_tuned="its positions are computed, and none is learned",
)
