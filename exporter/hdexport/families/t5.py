"""T5's encoder, also mT5's and UMT5's: learned numbers by clipped distance on every layer's scores."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.distance.model import attend_by_distance
from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.half_precision import IntoStates, RootMeanSquareNorm
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError


class _Attention(torch.nn.Module):
    """The projections of the original module around our operator, with numbers [1, 1, heads, 2 * reach + 1] by
    distance.
    """

    def __init__(self, original: Any, scores_by_distance: torch.nn.Parameter) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = original.q, original.k, original.v, IntoStates(original.o)
        self.scores_by_distance = scores_by_distance
        self.head_dim = int(original.key_value_proj_dim)

    def forward(self, hidden_states: torch.Tensor, mask: DenseMask) -> torch.Tensor:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)  # [batch, tokens, heads, head_dim]
        hidden_states = hidden_states.to(self.q.weight.dtype)
        query, key, value = (project(hidden_states).view(heads) for project in (self.q, self.k, self.v))
        attended = attend_by_distance(mask, query, key, value, self.scores_by_distance, scale=1.0)
        return self.o(attended.flatten(2))


class _FeedForward(torch.nn.Module):
    """The original network, its results in float32."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.gated = hasattr(original, "wi_0")
        self.wi, self.act = (original.wi_0 if self.gated else original.wi), original.act
        self.factors = original.wi_1 if self.gated else None
        self.wo = IntoStates(original.wo)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states.to(self.wi.weight.dtype)
        inner = self.act(self.wi(hidden_states))
        if self.factors is not None:
            inner = inner * self.factors(hidden_states)
        return self.wo(inner)


class Layer(torch.nn.Module):
    """A layer whose states are float32, and whose products have the type of the weights.

    `attention` takes the normalised states, [batch, tokens, hidden_size], float32, and the mask of `run_layers`; its
    result is added to the states.
    """

    def __init__(self, original: Any, attention: torch.nn.Module) -> None:
        super().__init__()
        attends, computes = original.layer[0], original.layer[-1]
        self.attention_norm, self.attention = RootMeanSquareNorm(attends.layer_norm), attention
        self.network_norm = RootMeanSquareNorm(computes.layer_norm)
        self.network = _FeedForward(computes.DenseReluDense)

    def forward(self, hidden_states: torch.Tensor, mask: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.attention_norm(hidden_states), mask)
        return hidden_states + self.network(self.network_norm(hidden_states))


def wide_states(stack: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """The input of the first layer of an encoder for ids [batch, tokens]: [batch, tokens, hidden_size], float32."""
    embedded: torch.Tensor = stack.embed_tokens(input_ids)
    return embedded.float()


def run_layers(stack: Any, hidden_states: torch.Tensor, mask: Any) -> BaseModelOutput:
    """Run an encoder whose layers are `Layer` on the states of `wide_states`; every attention is given the mask."""
    for layer in stack.block:
        hidden_states = layer(hidden_states, mask)
    normalised = stack.final_layer_norm(hidden_states)
    return BaseModelOutput(last_hidden_state=normalised.to(stack.embed_tokens.weight.dtype))


def _forward(
    model: PreTrainedModel, stack: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
) -> BaseModelOutput:
    """The encoder's forward without transformers' step for float16: clamping states if one of them is infinite."""
    states = wide_states(stack, input_ids)
    # The configuration of the whole model says who attends; UMT5's encoder has a copy.
    mask = create_bidirectional_mask(config=model.config, inputs_embeds=states, attention_mask=attention_mask)
    return run_layers(stack, states, mask)


def check_buckets(attention: Any) -> None:
    """Refuse, by a ModelError, an attention of transformers' whose buckets are not buckets of distances."""
    buckets, reach = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    # Half of the buckets are for each direction, and half of these for single distances.
    if not 4 <= buckets < 4 * reach:
        raise ModelError(
            f"config.json has relative_attention_num_buckets {buckets} and relative_attention_max_distance {reach}; 4 "
            "buckets or more, and a distance above a quarter of them, are needed.",
            hint="Set both to the model's, e.g. 32 and 128.",
        )


def _scores_by_distance(attention: Any) -> torch.nn.Parameter:
    """The terms that an attention adds to the scores of each distance it tells apart: [1, 1, heads, 2 * reach + 1]."""
    check_buckets(attention)
    reach = attention.relative_attention_max_distance
    # One query stands in the middle of its keys: transformers' own code decides which bucket a distance is in.
    table = attention.compute_bias(1, 2 * reach + 1, past_seen_tokens=reach)
    return torch.nn.Parameter(table.detach().transpose(1, 2).contiguous())


def _adapt(model: PreTrainedModel) -> None:
    stack: Any = model.base_model.encoder
    attentions = [layer.layer[0].SelfAttention for layer in stack.block]
    tables: list[torch.nn.Parameter] = []
    for attention in attentions:
        # All layers use the first one's; UMT5's have their own.
        tables.append(_scores_by_distance(attention) if attention.has_relative_attention_bias else tables[-1])
    stack.block = torch.nn.ModuleList(
        Layer(layer, _Attention(attention, table))
        for layer, attention, table in zip(stack.block, attentions, tables, strict=True)
    )
    stack.final_layer_norm = RootMeanSquareNorm(stack.final_layer_norm)
    stack.forward = functools.partial(_forward, model, stack)


FAMILY = Family(
    tasks=(Task.FEATURE_EXTRACTION, Task.TOKEN_CLASSIFICATION),
    learned_positions=False,
    relative_positions=True,
    embeddings=lambda model: model.base_model.encoder,
    adapt=_adapt,
    conversion_unsupported_reason=UnsupportedReason.RELATIVE_POSITIONS,
)
