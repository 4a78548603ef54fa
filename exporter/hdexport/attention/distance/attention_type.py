"""Attention by clipped distance, as a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hdexport.attention.clipped_distances import ClippedDistanceAttentionType, ClippedDistances
from hdexport.attention.distance.lower import LOWERING


@dataclass(frozen=True, kw_only=True)
class ClippedAttention(ClippedDistances):
    """Layers in which every query sees every real token, with terms of its distance."""

    score_copies: ClassVar = 5
    """The products, the terms of distances, the sum, the masked, the weights."""
    type: Literal["clipped"] = "clipped"


class DistanceAttentionType(ClippedDistanceAttentionType):
    """The attention of T5 and NEZHA."""

    name = "clipped"
    record_type = ClippedAttention
    lowerings = (LOWERING,)
    operator = "ClippedDistanceAttention"
    title = "attention by distance"


ATTENTION_TYPE = DistanceAttentionType()
