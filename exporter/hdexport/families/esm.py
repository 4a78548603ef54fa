"""ESM-2 and ESM-1b: language models of proteins, with rotary positions or RoBERTa's, and embeddings that count masks.

Source: Lin et al., "Evolutionary-scale prediction of atomic-level protein structure with a language model" (2023).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.model.family import Family
from hdexport.model.rotary import use_rotary_tables
from hdruntime.errors import ModelError

_TRAINED_MASKS = 0.15 * 0.8
"""Share of the tokens that were masked in training, fixed in the model's code."""


def _embed(embeddings: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
    """[batch, tokens, width]: the original's, in which masked tokens are 0 and the others as much larger.

    The original divides by the number of tokens, which makes NaN of a row that is all padding and of one that is all
    masks, and counts the masks of padding, too.
    """
    states = embeddings.word_embeddings(input_ids)
    is_real = attention_mask.unsqueeze(-1)  # [batch, tokens, 1]
    if embeddings.token_dropout:
        is_mask = input_ids == embeddings.mask_token_id
        states = states.masked_fill(is_mask.unsqueeze(-1), 0.0)
        tokens = attention_mask.sum(1)
        kept = (tokens - (is_mask * attention_mask).sum(1)).clamp(min=1)
        factor = (1 - _TRAINED_MASKS) * tokens.float() / kept.float()
        states = (states.float() * factor[:, None, None]).to(states.dtype)
    if embeddings.position_embedding_type == "absolute":
        states = states + embeddings.position_embeddings(_rows(input_ids, embeddings.padding_idx))
    if embeddings.layer_norm is not None:
        states = embeddings.layer_norm(states)
    # Where, not a product: the content of padding may be anything.
    return torch.where(is_real > 0, states, torch.zeros((), dtype=states.dtype, device=states.device))


def _rows(input_ids: torch.Tensor, padding_row: int) -> torch.Tensor:
    """[batch, tokens], int64, of the table of positions."""
    is_real = (input_ids != padding_row).to(torch.int64)
    return is_real.cumsum(1) * is_real + padding_row


def _adapt(model: PreTrainedModel) -> None:
    base: Any = model.base_model
    base.embeddings.forward = functools.partial(_embed, base.embeddings)
    use_rotary_tables(model)
    for layer in base.encoder.layer:
        # Its code writes out the GELU of the error function.
        layer.intermediate.forward = functools.partial(_intermediate, layer.intermediate)


def _intermediate(module: Any, states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(module.dense(states))


_TABLE = Family(
    position_embedding_types=("absolute", "rotary"),
    padding_row=lambda config: int(config.pad_token_id),
    adapt=_adapt,
)

_ROTARY = dataclasses.replace(
    _TABLE,
    learned_positions=False,
    padding_row=lambda config: None,
)


def _of_config(config: Mapping[str, Any]) -> Family:
    """The family by the kind of positions; a ModelError rejects a model that folds proteins."""
    if config.get("is_folding_model"):
        raise ModelError(
            "config.json has is_folding_model true: an ESMFold computes structures; its encoder can be built.",
            hint="Choose a checkpoint of the language model, such as ESM-2's.",
        )
    return _ROTARY if config.get("position_embedding_type") == "rotary" else _TABLE


FAMILY = dataclasses.replace(_ROTARY, of_config=_of_config)
