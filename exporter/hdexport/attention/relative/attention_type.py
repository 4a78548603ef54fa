"""Relative attention, XLNet's and Transformer-XL's, as a kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from hdexport.model.memory_cache import MASK, MemoryCache, memory_input
from hdruntime.bundle.checked_json import Size, TokenCount
from hdruntime.bundle.manifest import Fill, InputSpec, Manifest
from hdruntime.bundle.reader import Bundle

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class RelativeAttention(AttentionRecord):
    """Layers whose scores are of a key's content and of its distance, after Transformer-XL.

    Attributes:
        layers: how many.
        memory: tokens of earlier calls that are remembered; 0 for none.
        reuse: number of a call's first tokens that enter the memory; 0 for all.
        reach: distances that a query sees, its own 0 included; 0 for all.
        clamp: distances beyond it count as it; 0 for none.
        causal: whether tokens see earlier ones only.
        empty_memory_is_seen: whether a memory that nothing was put in yet is attended to, as zeros.
    """

    holds_scores: ClassVar = False
    score_copies: ClassVar = 6
    """Contents, positions, shifted positions, the sum, masked scores, weights."""
    type: Literal["relative"] = "relative"
    layers: Size
    memory: TokenCount
    reuse: TokenCount = 0
    reach: TokenCount = 0
    clamp: TokenCount = 0
    causal: bool = False
    empty_memory_is_seen: bool = False

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """The text's own tokens; the memory is another call's."""
        return [tokens] * self.layers

    @property
    def baseline_note(self) -> str | None:
        """Baselines run one text alone."""
        return "runs each text alone, as if nothing had been before it" if self.memory else None


@dataclass(frozen=True, kw_only=True)
class RelativeConversion(AttentionConversion):
    """Relative attention in a model for texts of up to `max_len` tokens."""

    record: RelativeAttention
    max_len: int


class RelativeAttentionType(AttentionType):
    """Scores by content and by distance, over the text and the memory before it."""

    name = "relative"
    record_type = RelativeAttention

    def conversion(self, request: None, context: ConversionContext) -> RelativeConversion | None:
        """A family's own attention, which remembers as many tokens as the configuration says, or as were asked for."""
        config, native = context.model.config, context.family.native_attention
        # First of all: a configuration may be of use with a memory only.
        if context.recurrence is not None and native is not None and native.attention_type == self.name:
            config.mem_len = context.recurrence
        record: RelativeAttention | None = context.family.native_record(self.name, config)
        if record is None:
            return None
        memory_cache = _memory_inputs(record, config.hidden_size)
        if memory_cache and native is not None:
            memory_cache = (*memory_cache, *native.extra_states(config, context.task))
        return _conversion(record, memory_cache, context.max_len)

    def problems(self, record: RelativeAttention, manifest: Manifest) -> Iterator[str]:
        if record.memory != manifest.max_memory:
            yield f".memory is {record.memory}, and the inputs have memories of {manifest.max_memory} tokens"

    def read(self, record: RelativeAttention, bundle: Bundle) -> RelativeConversion:
        return _conversion(record, bundle.manifest.recurrent_states, bundle.manifest.max_len)

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Transformers' own model, or its replacement where transformers dropped it, and what it carries."""
        assert isinstance(conversion, RelativeConversion)
        assert family.native_attention is not None
        if conversion.memory_cache is not None:
            assert family.native_attention.use_states is not None
            family.native_attention.use_states(model, conversion)
        # Its padding sees itself, where ours is 0.
        return ReferenceProperties(undefined_padding=True, memory_cache=conversion.memory_cache)

    def boundaries(self, record: RelativeAttention) -> Boundaries | None:
        """Around the size of the memory, where a text takes all of it, and where distances are clamped."""
        sizes = {size for size in (record.memory, record.clamp, record.reuse) if size}
        if not sizes:
            return None
        lengths = frozenset(size + step for size in sizes for step in (-1, 0, 1)) - {0}
        return Boundaries(lengths=lengths, first=min(sizes), second=max(sizes) + 1)

    def describe(self, record: RelativeAttention) -> Iterator[tuple[str, str]]:
        yield "relative attention", f"{record.layers} layers" + (", causal" if record.causal else "")
        if not record.memory:
            yield "memory", "none: --recurrence TOKENS of a build gives it one"
        elif record.reuse:
            yield "", f"of each segment its first {record.reuse} tokens are remembered"
        if record.reach:
            yield "", f"a token sees {record.reach} tokens back, itself included"
        if record.clamp:
            yield "", f"distances beyond {record.clamp} count as {record.clamp}"


ATTENTION_TYPE = RelativeAttentionType()


def _memory_inputs(record: RelativeAttention, width: int) -> tuple[InputSpec, ...]:
    """Each layer's memory, and which of its tokens are there."""
    if not record.memory:
        return ()
    fill = Fill.ONES if record.empty_memory_is_seen else Fill.ZEROS
    return (
        *(memory_input(layer, "memory", width, bound=record.memory) for layer in range(record.layers)),
        memory_input(MASK, "memory", bound=record.memory, fill=fill),
    )


def _conversion(record: RelativeAttention, memory_cache: Sequence[InputSpec], max_len: int) -> RelativeConversion:
    return RelativeConversion(
        is_native=True,
        inputs=tuple(memory_cache),
        memory_cache=MemoryCache(memory_cache) if memory_cache else None,
        record=record,
        max_len=max_len,
    )
