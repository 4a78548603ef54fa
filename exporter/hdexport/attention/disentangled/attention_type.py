"""Disentangled attention, DeBERTa's, as a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hdexport.attention.attention_type import AttentionConversion, ReferenceProperties
from hdexport.attention.clipped_distances import ClippedDistanceAttentionType, ClippedDistances
from hdexport.model.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class DisentangledAttention(ClippedDistances):
    """Layers in which every query sees every real token, with products of both and their distance."""

    score_copies: ClassVar = 10
    """PyTorch's code gathers by indices of 8 bytes, both ways."""
    type: Literal["disentangled"] = "disentangled"


class DisentangledAttentionType(ClippedDistanceAttentionType):
    """The attention of DeBERTa."""

    name = "disentangled"
    record_type = DisentangledAttention
    operator = "DisentangledAttention"
    title = "disentangled attention"

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Transformers' own model, in which padding sees everything alike."""
        return ReferenceProperties(undefined_padding=True)


ATTENTION_TYPE = DisentangledAttentionType()
