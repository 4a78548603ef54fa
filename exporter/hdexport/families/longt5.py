"""LongT5's encoder: T5's layers, whose tokens see near tokens and, if transient-global, sums of blocks of all."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hdexport.attention.attention_type import AttentionConversion
from hdexport.attention.local_global.attention_type import LocalGlobalAttention
from hdexport.attention.local_global.model import LocalTokens, local_global_node
from hdexport.families.t5 import Layer, check_buckets, run_layers, wide_states
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdexport.model.half_precision import IntoStates, RootMeanSquareNorm
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError


class _Attention(torch.nn.Module):
    """The projections of the original module around our operator.

    `local_bias` is [heads, 2 * radius + 1], `side_bias` [heads, 2 * reach + 1], or None for no sides.
    """

    def __init__(self, original: Any, local_bias: torch.nn.Parameter, side_bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = original.q, original.k, original.v, IntoStates(original.o)
        self.local_bias, self.side_bias = local_bias, side_bias
        self.side_norm = None if side_bias is None else RootMeanSquareNorm(original.global_input_layer_norm)
        self.head_dim = int(original.key_value_proj_dim)

    def forward(self, hidden_states: torch.Tensor, tokens: LocalTokens) -> torch.Tensor:
        typed = hidden_states.to(self.q.weight.dtype)
        query, key, value = (self._heads(project(typed)) for project in (self.q, self.k, self.v))
        side_key, side_value = None, None
        if self.side_norm is not None:
            sides = self.side_norm(tokens.side_sums(hidden_states)).to(typed.dtype)
            side_key, side_value = self._heads(self.k(sides)), self._heads(self.v(sides))
        attended = local_global_node(
            query,
            key,
            value,
            tokens.token_mask,
            self.local_bias,
            side_key,
            side_value,
            self.side_bias,
            side_tokens=tokens.side_tokens,
            scale=1.0,
        )
        return self.o(attended.flatten(2))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads * head_dim] as [batch, tokens, heads, head_dim]."""
        return states.unflatten(2, (-1, self.head_dim))


def _forward(
    stack: Any, side_tokens: int, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
) -> BaseModelOutput:
    """The encoder's forward without transformers' step for float16: clamping states if one of them is infinite."""
    tokens = LocalTokens(attention_mask.to(torch.int32), side_tokens)
    return run_layers(stack, wide_states(stack, input_ids), tokens)


def _table(attention: Any, embedding: torch.nn.Embedding, reach: int) -> torch.nn.Parameter:
    """The terms that an attention adds to the scores of each distance up to `reach`: [heads, 2 * reach + 1]."""
    # Transformers' own code decides which bucket a distance is in.
    buckets = attention._relative_position_bucket(
        torch.arange(-reach, reach + 1),
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return torch.nn.Parameter(embedding.weight.detach()[buckets].T.contiguous())


def _adapt(model: PreTrainedModel, conversion: AttentionConversion) -> None:
    stack: Any = model.base_model.encoder
    record: LocalGlobalAttention = conversion.record
    name = "TransientGlobalSelfAttention" if record.side_tokens else "LocalSelfAttention"
    attentions = [getattr(layer.layer[0], name) for layer in stack.block]
    # All layers use the first one's.
    first, side_bias = attentions[0], None
    check_buckets(first)
    local_bias = _table(first, first.relative_attention_bias, record.radius)
    if record.side_tokens:
        # Farther blocks all have the last bucket.
        reach = int(first.relative_attention_max_distance)
        side_bias = _table(first, first.global_relative_attention_bias, reach)
    stack.block = torch.nn.ModuleList(
        Layer(layer, _Attention(attention, local_bias, side_bias))
        for layer, attention in zip(stack.block, attentions, strict=True)
    )
    stack.final_layer_norm = RootMeanSquareNorm(stack.final_layer_norm)
    stack.forward = functools.partial(_forward, stack, record.side_tokens)


def _attention(config: Any) -> LocalGlobalAttention:
    """A LongT5's attention; a ModelError rejects another."""
    kinds = {"local": False, "transient-global": True}
    if config.encoder_attention_type not in kinds:
        raise ModelError(
            f"config.json has encoder_attention_type {config.encoder_attention_type!r}; "
            f"{' or '.join(map(repr, kinds))} can be built.",
            hint="Set it to the one that the model was trained with.",
        )
    if config.local_radius < 0:
        raise ModelError(
            f"config.json has local_radius {config.local_radius}, which must be 0 or more.",
            hint="Set it to the model's, e.g. 127.",
        )
    if not kinds[config.encoder_attention_type]:
        return LocalGlobalAttention(layers=config.num_layers, radius=config.local_radius)
    size = config.global_block_size
    # Transformers adds up 1 / size for each token, and of other sizes rounding decides where blocks end.
    if size < 1 or size & (size - 1):
        raise ModelError(
            f"config.json has global_block_size {size}; a power of two can be built: transformers cuts other blocks "
            "where its rounding does.",
            hint="Set it to the model's, e.g. 16.",
        )
    return LocalGlobalAttention(layers=config.num_layers, radius=config.local_radius, side_tokens=size)


FAMILY = Family(
    tasks=(Task.FEATURE_EXTRACTION,),
    learned_positions=False,
    relative_positions=True,
    embeddings=lambda model: model.base_model.encoder,
    native_attention=NativeAttention(attention_type="local_global", record=_attention, adapt=_adapt),
    conversion_unsupported_reason=UnsupportedReason.NATIVE_SPARSE,
)
