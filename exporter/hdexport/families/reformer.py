"""Reformer: LSH and local attention in chunks, axial positions, and two streams that layers add to."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.reformer.modeling_reformer import (
    AxialPositionEmbeddings,
    LSHSelfAttention,
    ReformerModelOutput,
)

from hdexport.attention.lsh import Chunks, LshAttention
from hdexport.attention.lsh.attention_type import LshConversion
from hdexport.attention.lsh.model import chunk_node, lsh_node
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError


class _SelfAttention(torch.nn.Module):
    """The projections of an ``LSHSelfAttention``, or a ``LocalSelfAttention``, around our operator."""

    def __init__(self, original: Any, record: LshAttention) -> None:
        super().__init__()
        names = ("query_key", "value") if isinstance(original, LSHSelfAttention) else ("query", "key", "value")
        self.projections = torch.nn.ModuleDict({name: getattr(original, name) for name in names})
        self.head_dim, self.record = int(original.attention_head_size), record

    def forward(
        self, hidden_states: torch.Tensor, token_mask: torch.Tensor, rotations: torch.Tensor | None
    ) -> torch.Tensor:
        """[batch, tokens, heads * head_dim].

        Args:
            hidden_states: [batch, tokens, hidden_size].
            token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
            rotations: [heads, head_dim, rounds, directions], float32; None where no layer hashes.
        """
        states = [project(hidden_states).unflatten(2, (-1, self.head_dim)) for project in self.projections.values()]
        scale = self.head_dim**-0.5
        if len(states) == 2:
            assert rotations is not None
            attended = lsh_node(states[0], states[1], token_mask, rotations, record=self.record, scale=scale)
        else:
            attended = chunk_node(states[0], states[1], states[2], token_mask, record=self.record, scale=scale)
        return attended.flatten(2)


class _Layer(torch.nn.Module):
    """A layer of two streams: attention to the second is added to the first, and feed-forward of that to the second."""

    def __init__(self, original: Any, record: LshAttention) -> None:
        super().__init__()
        self.layer_norm, self.output = original.attention.layer_norm, original.attention.output
        self.attention = _SelfAttention(original.attention.self_attention, record)
        self.feed_forward = original.feed_forward

    def forward(
        self,
        attended: torch.Tensor,
        hidden_states: torch.Tensor,
        token_mask: torch.Tensor,
        rotations: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams after the layer, [batch, tokens, hidden_size] each; see `_SelfAttention` for the arguments."""
        attended = attended + self.output(self.attention(self.layer_norm(hidden_states), token_mask, rotations))
        return attended, hidden_states + self.feed_forward.forward_chunk(attended)


def _forward(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> ReformerModelOutput:
    """The model's forward without steps for Hugging Face's attention: padding to chunks, caches, hidden state."""
    embeddings, token_mask = model.embeddings, attention_mask.to(torch.int32)
    # Folded positions look at the shape of the ids only.
    states = embeddings.word_embeddings(input_ids) + embeddings.position_embeddings(position_ids)
    attended = states
    for layer in model.encoder.layers:
        attended, states = layer(attended, states, token_mask, model.lsh_rotations)
    normalised = model.encoder.layer_norm(torch.cat([attended, states], dim=-1))
    return ReformerModelOutput(last_hidden_state=normalised)


def _adapt(model: PreTrainedModel, conversion: LshConversion) -> None:
    base: Any = model.base_model
    layers = [_Layer(layer, conversion.record) for layer in base.encoder.layers]
    base.encoder.layers = torch.nn.ModuleList(layers)
    base.register_buffer("lsh_rotations", conversion.rotations(model), persistent=False)
    base.forward = functools.partial(_forward, base)


def _prepare(model: PreTrainedModel) -> None:
    """Make one table of the positions: axial ones are side by side a row's and a column's."""
    embeddings: Any = model.base_model.embeddings
    positions = embeddings.position_embeddings
    if isinstance(positions, AxialPositionEmbeddings):
        shape = positions.axial_pos_shape
        parts = [weight.detach().expand(*shape, weight.shape[-1]) for weight in positions.weights]
        table = torch.cat(parts, dim=-1).flatten(0, len(shape) - 1)
        wanted = int(model.config.max_position_embeddings)
        if len(table) < wanted:
            sizes = " x ".join(map(str, shape))
            raise ModelError(
                f"config.json has max_position_embeddings {wanted}, and axial_pos_shape {sizes} makes {len(table)}.",
                hint=f"Set max_position_embeddings to {len(table)}.",
            )
        embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(table[:wanted].clone(), freeze=False)
    else:
        embeddings.position_embeddings = positions.embedding


def _attention(config: Any) -> LshAttention:
    """The record of a Reformer's layers without hashes, which a build adds; a ModelError if layers are invalid."""
    layers = tuple(config.attn_layers)
    if not layers or not set(layers) <= {"lsh", "local"}:
        raise ModelError(
            f"config.json has attn_layers {list(layers)}; a layer is lsh or local.",
            hint="Set it to the model's layers.",
        )
    hashed, local = (_chunks(config, kind) if kind in layers else None for kind in ("lsh", "local"))
    if hashed is not None:
        _check_hashes(config)
    sizes = [chunks.tokens for chunks in (hashed, local) if chunks is not None]
    return LshAttention(
        layers=layers,
        hashes=None,
        hashed=hashed,
        local=local,
        multiple=math.lcm(*sizes),
        causal=bool(config.is_decoder),
    )


def _chunks(config: Any, kind: str) -> Chunks:
    names = (f"{kind}_attn_chunk_length", f"{kind}_num_chunks_before", f"{kind}_num_chunks_after")
    for name, least in zip(names, (1, 0, 0), strict=True):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"config.json has {name} {value}; it must be {least} or more.", hint="Set it to the model's."
            )
    return Chunks(**dict(zip(("tokens", "before", "after"), (getattr(config, name) for name in names), strict=True)))


def _check_hashes(config: Any) -> None:
    buckets = config.num_buckets if isinstance(config.num_buckets, list) else [config.num_buckets]
    if buckets != [None] and (
        not buckets or any(not isinstance(factor, int) or factor < 2 or factor % 2 for factor in buckets)
    ):
        raise ModelError(
            f"config.json has num_buckets {config.num_buckets}; it must be an even number, or a list of them: half of "
            "the buckets are directions, and half their opposites.",
            hint="Set it to the model's, or to null.",
        )
    if not isinstance(config.num_hashes, int) or config.num_hashes < 1:
        raise ModelError(
            f"config.json has num_hashes {config.num_hashes}; it must be 1 or more.", hint="Set it to the model's."
        )


def _padded_tokens(config: Any, tokens: int) -> int:
    kinds = set(config.attn_layers)
    multiple = math.lcm(*(getattr(config, f"{kind}_attn_chunk_length") for kind in kinds))
    return -(-tokens // multiple) * multiple


def _of_config(config: Mapping[str, Any]) -> Family:
    """The family by its positions: axial positions are computed from several tables."""
    return dataclasses.replace(FAMILY, stores_table=config.get("axial_pos_embds") is False)


FAMILY = Family(
    of_config=_of_config,
    honors_is_decoder=True,
    prepare=_prepare,
    position_table="embeddings.position_embeddings.embedding.weight",
    token_width=lambda config: 2 * int(config.hidden_size),
    padded_tokens=_padded_tokens,
    native_attention=NativeAttention(attention_type="lsh", record=_attention, adapt=_adapt),
    tasks=(
        Task.FEATURE_EXTRACTION,
        Task.FILL_MASK,
        Task.TEXT_CLASSIFICATION,
        Task.QUESTION_ANSWERING,
    ),
    tuning_unsupported_reason=UnsupportedReason.LSH_TRAINING,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_SPARSE,
)
