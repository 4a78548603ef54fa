"""Common parts of kinds whose queries see every key, with terms of their distance that are clipped at a reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hdexport.attention.attention_type import (
    AttentionConversion,
    AttentionRecord,
    AttentionType,
    Boundaries,
    OperatorNode,
)
from hdruntime.bundle.checked_json import Size
from hdruntime.bundle.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class ClippedDistances(AttentionRecord):
    """Layers in which every query sees every real token.

    Attributes:
        layers: how many.
        reach: the distance, in tokens, that all beyond it count as.
    """

    holds_scores: ClassVar = False
    type: str
    layers: Size
    reach: Size

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        return [tokens] * self.layers


class ClippedDistanceAttentionType(AttentionType):
    """Families map their attention to the operator's nodes themselves.

    Attributes:
        operator: name of the operator.
        title: name of the attention type, as ``hdexport inspect`` shows it.
    """

    record_type: ClassVar[type[ClippedDistances]]
    operator: ClassVar[str]
    title: ClassVar[str]

    def record(self, conversion: AttentionConversion | None, nodes: Sequence[OperatorNode]) -> ClippedDistances | None:
        reaches = [int(node.attributes["reach"]) for node in nodes if node.operator == self.operator]
        return self.record_type(type=self.name, layers=len(reaches), reach=max(reaches)) if reaches else None

    def boundaries(self, record: ClippedDistances) -> Boundaries | None:
        lengths = frozenset(record.reach + step for step in (0, 1, 2)) | {2 * record.reach + 1}
        return Boundaries(lengths=lengths, first=record.reach + 2, second=2 * record.reach + 2)

    def describe(self, record: ClippedDistances) -> Iterator[tuple[str, str]]:
        yield self.title, f"{record.layers} layers; distances beyond {record.reach} tokens count as {record.reach}"
