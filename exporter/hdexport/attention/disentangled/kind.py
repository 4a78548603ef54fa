"""Disentangled attention, as a kind: that of DeBERTa."""

from __future__ import annotations

__all__ = ["DisentangledAttention", "DisentangledKind"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hdexport.attention.kind import AttentionKind, Boundaries, OperatorNode, ReferenceFacts, Setup
from hdexport.model.family import Family
from hdruntime.bundle.manifest import Manifest, Size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OPERATOR = "DisentangledAttention"

_SCORE_COPIES = 10
"""Of a layer's scores in PyTorch's own code, which gathers by indices of 8 bytes, both ways."""


@dataclass(frozen=True, kw_only=True)
class DisentangledAttention:
    """Layers in which every query sees every real token, with products of both and their distance.

    Attributes:
        layers: how many.
        reach: the distance, in tokens, that all beyond it count as.
    """

    kind: Literal["disentangled"] = "disentangled"
    layers: Size
    reach: Size


class DisentangledKind(AttentionKind):
    """Families map their attention to the operator's nodes themselves."""

    name = "disentangled"
    record_type = DisentangledAttention
    holds_scores = False

    def record(self, setup: Setup | None, nodes: Sequence[OperatorNode]) -> DisentangledAttention | None:
        """The nodes of the operator."""
        reaches = [int(node.attributes["reach"]) for node in nodes if node.operator == _OPERATOR]
        return DisentangledAttention(layers=len(reaches), reach=max(reaches)) if reaches else None

    def use_reference(self, setup: Setup, model: PreTrainedModel, family: Family) -> ReferenceFacts:
        """The library's own model, in which padding sees everything alike."""
        return ReferenceFacts(undefined_padding=True)

    def boundaries(self, record: DisentangledAttention) -> Boundaries | None:
        """Around the length at which distances are clipped first."""
        lengths = frozenset(record.reach + step for step in (0, 1, 2)) | {2 * record.reach + 1}
        return Boundaries(lengths=lengths, first=record.reach + 2, second=2 * record.reach + 2)

    def keys_of_layers(self, record: DisentangledAttention, manifest: Manifest, tokens: int) -> list[int]:
        """All tokens."""
        return [tokens] * record.layers

    def reference_copies(self, record: DisentangledAttention, family: Family, heads: int) -> int:
        """All of a layer, several times."""
        return _SCORE_COPIES * heads

    def describe(self, record: DisentangledAttention) -> Iterator[tuple[str, str]]:
        """Layers and reach."""
        yield (
            "disentangled attention",
            f"{record.layers} layers; distances beyond {record.reach} tokens count as {record.reach}",
        )
