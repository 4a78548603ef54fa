"""Attention as a model's own code computes it, as a kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from hdexport.attention.attention_type import (
    AttentionConversion,
    AttentionRecord,
    AttentionType,
    ConversionContext,
    OperatorNode,
)
from hdexport.model.family import Family
from hdruntime.bundle.checked_json import Size
from hdruntime.bundle.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class TracedAttention(AttentionRecord):
    """Layers of a model without a family whose attention is no operator of ours.

    Attributes:
        layers: how many.
    """

    score_copies: ClassVar = 4
    """The products, the sum with the mask, the weights, and a copy made of either."""
    type: Literal["traced"] = "traced"
    layers: Size

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        return [tokens] * self.layers


@dataclass(frozen=True, kw_only=True)
class TracedConversion(AttentionConversion):
    """The attention of a model without a family: `record` has all its layers."""

    def adapt(self, model: object, family: Family) -> None:
        """The family changes the model."""


class TracedAttentionType(AttentionType):
    """The standard operators that a trace of a model's own code leaves."""

    name = "traced"
    record_type = TracedAttention

    def conversion(self, request: None, context: ConversionContext) -> AttentionConversion | None:
        """The model's own, where no family was written for it."""
        if not context.family.is_generic:
            return None
        return TracedConversion(is_native=False, record=TracedAttention(layers=context.model.config.num_hidden_layers))

    def record(self, conversion: AttentionConversion | None, nodes: Sequence[OperatorNode]) -> TracedAttention | None:
        """The layers that have no node of our operators."""
        if conversion is None or len(nodes) >= conversion.record.layers:
            return None
        return dataclasses.replace(conversion.record, layers=conversion.record.layers - len(nodes))

    def describe(self, record: TracedAttention) -> Iterator[tuple[str, str]]:
        yield (
            "own attention",
            f"{record.layers} layers compute what the model's own code does, in standard operators: their memory grows "
            "with the square of the tokens",
        )


ATTENTION_TYPE = TracedAttentionType()
