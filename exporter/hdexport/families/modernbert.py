"""ModernBERT: rotary positions, and windows around each token in most layers."""

from __future__ import annotations

__all__ = ["FAMILY"]

import functools
from typing import TYPE_CHECKING, Any

import torch

from hdexport.model.family import Family
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies change with the length of the text."""


class _RotaryTables:
    """Cosines and sines of every kind of layer, in float32; the original rounds them to the type of the model.

    The library asks for one kind after the other in the order of a set, which is another in every process. What is
    asked first of a batch is answered for all kinds, in one order, so that a checkpoint always becomes the same graph.

    Args:
        rotary: the original, which has the frequencies.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._position_ids: torch.Tensor | None = None
        self._tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [1, tokens, head_dim], for a kind of layer."""
        if position_ids is not self._position_ids:
            self._position_ids = position_ids
            self._tables = {kind: self._of_kind(position_ids, kind) for kind in self._rotary.layer_types}
        return self._tables[layer_type]

    def _of_kind(self, position_ids: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = getattr(self._rotary, f"{layer_type}_inv_freq")  # [head_dim / 2]
        angles = position_ids[..., None].float() * frequencies  # [1, tokens, head_dim / 2]
        scaling = getattr(self._rotary, f"{layer_type}_attention_scaling")
        cosines, sines = ((table * scaling if scaling != 1 else table) for table in (angles.cos(), angles.sin()))
        return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)


def _classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A classifier's forward pass: its pooling in float32, and of real tokens only.

    The original sums thousands of tokens in the type of the model. Of the first token it takes whatever stands at
    index 0: with padding on the left that is not a token, and its row differs from one attention implementation of
    transformers to the other.
    """
    from transformers.modeling_outputs import SequenceClassifierOutput

    hidden_states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    pooled = attention_mask
    if model.config.classifier_pooling == "cls":
        pooled = attention_mask * (attention_mask.cumsum(1) == 1)
    weights = pooled[..., None].float()  # [batch, tokens, 1]
    mean = (hidden_states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
    return SequenceClassifierOutput(logits=model.classifier(model.head(mean.to(hidden_states.dtype))))


def _adapt(model: PreTrainedModel) -> None:
    from transformers import ModernBertForSequenceClassification

    rotary = model.base_model.rotary_emb
    refused = sorted({kind for kind in rotary.rope_type.values() if kind in _LENGTH_DEPENDENT})
    if refused:
        raise ModelError(
            f"The rotary positions of kind {refused[0]!r} change with the length of a text; a graph cannot do that.\n"
            "Choose a checkpoint whose rope_parameters have a fixed rope_type: default, linear, yarn or llama3."
        )
    rotary.forward = _RotaryTables(rotary)
    if isinstance(model, ModernBertForSequenceClassification):
        model.forward = functools.partial(_classify, model)


FAMILY = Family(
    model_types=("modernbert",),
    learned_positions=False,
    stretches_rotary=True,
    adapt=_adapt,
    why_not_converted="its local layers have windows already, and its global layers attend to the whole text",
)
