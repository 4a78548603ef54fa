"""Local attention with sides, LongT5's, as a kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hdexport.attention.attention_type import (
    AttentionConversion,
    AttentionRecord,
    AttentionType,
    Boundaries,
    ConversionContext,
    ReferenceProperties,
)
from hdexport.model.family import Family
from hdruntime.bundle.checked_json import Size, TokenCount
from hdruntime.bundle.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class LocalGlobalAttention(AttentionRecord):
    """Layers in which a token sees the tokens around it, and sums of blocks of the whole text.

    Attributes:
        layers: how many.
        radius: tokens that one sees on each side.
        side_tokens: tokens of a block whose sum every token sees; 0 for no such sums.
    """

    holds_scores: ClassVar = False
    type: Literal["local_global"] = "local_global"
    layers: Size
    radius: TokenCount
    side_tokens: TokenCount = 0

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        window = min(tokens, 2 * self.radius + 1)
        sides = tokens // self.side_tokens if self.side_tokens else 0
        return [window + sides] * self.layers

    def reference_copies(self, heads: int, *, has_sdpa: bool) -> int:
        """Copies of tokens' scores with sides; windows are linear in tokens."""
        return -(-_SIDE_COPIES * heads // self.side_tokens) if self.side_tokens else 0


_SIDE_COPIES = 10
"""Copies of a layer's scores with sides in PyTorch's own code, for each head; measured, with the windows' memory: 2006
MB for 8192 tokens, 12 heads and sides of 16."""


class LocalGlobalAttentionType(AttentionType):
    """Tokens around each token, with learned numbers of their distances, and sums of blocks of the text."""

    name = "local_global"
    record_type = LocalGlobalAttention

    def conversion(self, request: None, context: ConversionContext) -> AttentionConversion | None:
        record: LocalGlobalAttention | None = context.family.native_record(self.name, context.model.config)
        return None if record is None else AttentionConversion(is_native=True, record=record)

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Transformers' own model, as it is. Padding there sees all keys alike, where ours is 0."""
        return ReferenceProperties(undefined_padding=True)

    def boundaries(self, record: LocalGlobalAttention) -> Boundaries | None:
        """Around transformers' blocks, of a radius and 1, around a window, and where texts get sides."""
        block, size = record.radius + 1, record.side_tokens
        edges = {block, 2 * block, 3 * block, *((size, 2 * size, 5 * size) if size else ())}
        lengths = frozenset(edge + step for edge in edges for step in (-1, 0, 1)) - {0}
        return Boundaries(lengths=lengths, first=block + 1, second=3 * block + max(size - 1, 1))

    def describe(self, record: LocalGlobalAttention) -> Iterator[tuple[str, str]]:
        yield "local attention", f"{record.layers} layers; a token sees {record.radius} tokens on each side"
        if record.side_tokens:
            yield "", f"and the sum of each {record.side_tokens} tokens of the text"


ATTENTION_TYPE = LocalGlobalAttentionType()
