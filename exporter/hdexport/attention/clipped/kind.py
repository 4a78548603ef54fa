"""Attention by clipped distance, as a kind."""

from __future__ import annotations

__all__ = ["ClippedAttention", "ClippedKind"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hdexport.attention.kind import AttentionKind, Boundaries, OperatorNode, Setup
from hdexport.model.family import Family
from hdruntime.bundle.manifest import Manifest, Size

_SCORE_COPIES = 5
"""Of a layer's scores in PyTorch's own code: the products, the terms of distances, the sum, the masked, the weights."""


@dataclass(frozen=True, kw_only=True)
class ClippedAttention:
    """Layers in which every query sees every real token, with terms of its distance.

    Attributes:
        layers: how many.
        reach: the distance, in tokens, that all beyond it count as.
    """

    kind: Literal["clipped"] = "clipped"
    layers: Size
    reach: Size


class ClippedKind(AttentionKind):
    """Families map their attention to the operator's nodes themselves."""

    name = "clipped"
    record_type = ClippedAttention
    holds_scores = False

    def record(self, setup: Setup | None, nodes: Sequence[OperatorNode]) -> ClippedAttention | None:
        """The nodes of the operator."""
        reaches = [int(node.attributes["reach"]) for node in nodes if node.operator == "ClippedDistanceAttention"]
        return ClippedAttention(layers=len(reaches), reach=max(reaches)) if reaches else None

    def boundaries(self, record: ClippedAttention) -> Boundaries | None:
        """Around the length at which distances are clipped first."""
        lengths = frozenset(record.reach + step for step in (0, 1, 2)) | {2 * record.reach + 1}
        return Boundaries(lengths=lengths, first=record.reach + 2, second=2 * record.reach + 2)

    def keys_of_layers(self, record: ClippedAttention, manifest: Manifest, tokens: int) -> list[int]:
        """All tokens."""
        return [tokens] * record.layers

    def reference_copies(self, record: ClippedAttention, family: Family, heads: int) -> int:
        """All of a layer, several times."""
        return _SCORE_COPIES * heads

    def describe(self, record: ClippedAttention) -> Iterator[tuple[str, str]]:
        """Layers and reach."""
        yield (
            "attention by distance",
            f"{record.layers} layers; distances beyond {record.reach} tokens count as {record.reach}",
        )
