"""XLNet: relative attention with a memory of the segments before, in one stream of queries."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel, XLNetForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.xlnet.modeling_xlnet import XLNetModelOutput

from hdexport.attention.relative.attention_type import RelativeAttention, RelativeConversion
from hdexport.attention.relative.model import Distances, key_kinds, relative_node
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdexport.model.memory_cache import MASK, MemoryCache, text_ends, updated_memory
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, Setting

_SUMMARIES = ("last", "first", "mean")
"""The vector that a classifier reads of a text, by ``summary_type``: one of its tokens', or the mean of all."""


def _projection(weight: torch.Tensor, *, is_output: bool = False) -> torch.nn.Linear:
    """A projection that the original holds as [hidden_size, heads, head_dim]."""
    flat = weight.detach().flatten(1)
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(flat if is_output else flat.T.contiguous())
    return linear


class _Layer(torch.nn.Module):
    """A layer: relative attention to its memory and to the text, and a feed-forward network."""

    def __init__(self, original: Any, distances: Distances) -> None:
        super().__init__()
        attention = original.rel_attn
        self.query, self.key, self.value, self.position = (
            _projection(getattr(attention, name)) for name in ("q", "k", "v", "r")
        )
        self.output = _projection(attention.o, is_output=True)
        self.content_bias, self.position_bias = attention.r_w_bias, attention.r_r_bias
        self.segment_bias, self.segments = attention.r_s_bias, attention.seg_embed
        self.layer_norm, self.feed_forward = attention.layer_norm, original.ff
        self.heads, self.scale, self.distances = int(attention.n_head), float(attention.scale), distances

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None,
        key_kind: torch.Tensor,
        sinusoids: torch.Tensor,
        has_segments: bool,
    ) -> torch.Tensor:
        """[batch, tokens, hidden_size], of states of that shape.

        Args:
            memory: [batch, memory, hidden_size]; None for none.
            key_kind: [batch, memory + tokens], int32, as the operator wants it.
            sinusoids: [distances, hidden_size], of all distances.
            has_segments: whether tokens are of different segments.
        """
        seen = hidden_states if memory is None else torch.cat([memory.to(hidden_states.dtype), hidden_states], dim=1)
        query = self._heads(self.query(hidden_states))
        # The positions depend on constants only: a runtime computes them once. The slice of the text follows.
        positions = self.position(sinusoids.to(hidden_states.dtype)).unflatten(1, (self.heads, -1)).transpose(0, 1)
        attended = relative_node(
            query,
            self._heads(self.key(seen)),
            self._heads(self.value(seen)),
            key_kind,
            self.distances.seen(positions, tokens=hidden_states.shape[1], keys=seen.shape[1]),
            self.content_bias,
            self.position_bias,
            self._segment_scores(query) if has_segments else None,
            record=self.distances.record,
            scale=self.scale,
        )
        projected = self.output(attended.flatten(2))
        return self.feed_forward(self.layer_norm(projected + hidden_states))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(2, (self.heads, -1))

    def _segment_scores(self, query: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads]: terms of other segments' keys, less the terms of keys of the query's own segment.

        The original adds a term to keys of the own segment, too: to all keys alike, which changes no weight.
        """
        difference = self.segments[1] - self.segments[0]
        return ((query + self.segment_bias) * difference).sum(-1)


def _forward(
    model: Any,
    memory_cache: MemoryCache | None,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    **_: Any,
) -> XLNetModelOutput:
    """The model's forward for one stream of queries; memories are looked up, not given."""
    assert input_ids is not None
    assert attention_mask is not None
    states, reuse = model.word_embedding(input_ids), model.record.reuse or None
    kinds = key_kinds(attention_mask, None if memory_cache is None else memory_cache.read(MASK), token_type_ids)
    reused = attention_mask[:, :reuse]
    ends = text_ends(reused)
    if memory_cache is not None:
        memory_cache.write(MASK, updated_memory(memory_cache.read(MASK), reused, ends))
    for number, layer in enumerate(model.layer):
        memory = None
        if memory_cache is not None:
            memory = memory_cache.read(number)
            memory_cache.write(number, updated_memory(memory, states[:, :reuse], ends))
        states = layer(states, memory, kinds, model.sinusoids, token_type_ids is not None)
    return XLNetModelOutput(last_hidden_state=states)


def _classify(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    token_type_ids: torch.Tensor | None = None,
) -> Any:
    """A classifier's forward, which reads real tokens only, wherever padding is."""
    states = model.transformer(
        input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
    ).last_hidden_state
    mask = attention_mask.to(torch.int64)
    place, last = mask.cumsum(1) * mask, mask.sum(1, keepdim=True)
    read = {"last": place == last, "first": place == 1, "mean": mask == 1}[model.sequence_summary.summary_type]
    weights = (read & (mask == 1)).unsqueeze(-1).float()  # [batch, tokens, 1]
    # A product would make NaN of a NaN in the padding.
    chosen = torch.where(weights > 0, states.float(), 0.0)
    summary = chosen.sum(1) / weights.sum(1).clamp(min=1)
    head = model.sequence_summary
    return SequenceClassifierOutput(logits=model.logits_proj(head.activation(head.summary(summary.to(states.dtype)))))


def _adapt(model: PreTrainedModel, conversion: RelativeConversion) -> None:
    base: Any = model.base_model
    distances = Distances(conversion.record, conversion.max_len)
    base.record = conversion.record
    base.layer = torch.nn.ModuleList(_Layer(layer, distances) for layer in base.layer)
    base.register_buffer("sinusoids", distances.sinusoids(base.d_model), persistent=False)
    base.forward = functools.partial(_forward, base, conversion.memory_cache)
    if isinstance(model, XLNetForSequenceClassification):
        summary = model.sequence_summary.summary_type
        if summary not in _SUMMARIES:
            raise ModelError(
                f"config.json has summary_type {summary!r}; classifiers of {', '.join(_SUMMARIES)} can be built.",
                hint=("Build token embeddings instead: ", Setting("task", Task.FEATURE_EXTRACTION)),
            )
        model.forward = functools.partial(_classify, model)


def _remember(model: PreTrainedModel, conversion: RelativeConversion) -> None:
    """Hand transformers' model its memory; it sees all of that, so tokens that are not there are cut off before."""
    base: Any = model.base_model
    memory_cache, size = conversion.memory_cache, conversion.record.memory
    assert memory_cache is not None
    base.mem_len = size
    original = base.forward

    def forward(*given: Any, attention_mask: torch.Tensor, **named: Any) -> Any:
        mask = memory_cache.read(MASK)
        missing = int((mask[0] == 0).sum())
        if not (mask == (torch.arange(mask.shape[1]) >= missing)).all():
            raise ValueError("Hugging Face's XLNet sees memories whole: masks must be zeros, then ones, in all rows.")
        before = [memory_cache.read(layer) for layer in range(conversion.record.layers)]
        there = [memory[:, missing:].transpose(0, 1) for memory in before]
        remembered_states = there if missing < mask.shape[1] else None
        named |= {"mems": remembered_states, "use_mems": True}
        output = original(*given, attention_mask=attention_mask.float(), **named)
        for layer, (memory, left) in enumerate(zip(before, output.mems, strict=True)):
            whole = torch.cat([memory[:, :missing], left.transpose(0, 1)], dim=1)
            memory_cache.write(layer, whole[:, whole.shape[1] - memory.shape[1] :])
        reused = attention_mask[:, : conversion.record.reuse or None]
        memory_cache.write(MASK, updated_memory(mask, reused, text_ends(reused)))
        return output

    base.forward = forward


def _attention(config: Any) -> RelativeAttention:
    """An XLNet's attention; a ModelError rejects another."""
    for key, value, fits in (
        ("attn_type", config.attn_type, ("bi", "uni")),
        ("bi_data", config.bi_data, (False,)),
        ("same_length", config.same_length, (False,)),
    ):
        if value not in fits:
            raise ModelError(
                f"config.json has {key} {value!r}; {' or '.join(map(repr, fits))} can be built.",
                hint="Set it, if the model was trained so.",
            )
    return RelativeAttention(
        layers=config.n_layer,
        memory=max(0, config.mem_len or 0),
        reuse=max(0, config.reuse_len or 0),
        clamp=max(0, config.clamp_len),
        causal=config.attn_type == "uni",
    )


FAMILY = Family(
    learned_positions=False,
    relative_positions=True,
    embeddings=lambda model: model.base_model,
    native_attention=NativeAttention(attention_type="relative", record=_attention, adapt=_adapt, use_states=_remember),
    tasks=(
        Task.FEATURE_EXTRACTION,
        Task.TEXT_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
        Task.QUESTION_ANSWERING,
    ),
    task_unsupported_reason=UnsupportedReason.TWO_STREAMS,
    classifies_first=False,
    # Segments are compared and not looked up, so any number is valid: the maximum of a manifest.
    token_types=2**24,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_RECURRENCE,
)
