"""Disentangled attention, DeBERTa's, as a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hdexport.attention.clipped_distances import ClippedDistanceKind, ClippedDistances
from hdexport.attention.kind import ReferenceFacts, Setup
from hdexport.model.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class DisentangledAttention(ClippedDistances):
    """Layers in which every query sees every real token, with products of both and their distance."""

    score_copies: ClassVar = 10
    """PyTorch's code gathers by indices of 8 bytes, both ways."""
    kind: Literal["disentangled"] = "disentangled"


class DisentangledKind(ClippedDistanceKind):
    """The attention of DeBERTa."""

    name = "disentangled"
    record_type = DisentangledAttention
    operator = "DisentangledAttention"
    title = "disentangled attention"

    def use_reference(self, setup: Setup, model: PreTrainedModel, family: Family) -> ReferenceFacts:
        """The library's own model, in which padding sees everything alike."""
        return ReferenceFacts(undefined_padding=True)


KIND = DisentangledKind()
