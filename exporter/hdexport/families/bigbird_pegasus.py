"""BigBird-Pegasus' encoder: BigBird's attention in layers that normalise first, and positions that count from row 0."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from hdexport.attention.blocks import BlockSparse
from hdexport.attention.blocks.conversion import BlockConversion
from hdexport.attention.interface import LayerMask
from hdexport.families.big_bird import BigBirdAttention, block_sparse, forget_short_texts, own_blocks, run_layers
from hdexport.families.led import prepare_positions
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdruntime.bundle.manifest import Task


class _Layer(torch.nn.Module):
    """A layer of the original's parts, without its search for infinity in float16, a branch that graphs cannot have."""

    def __init__(self, original: Any, attention: BigBirdAttention) -> None:
        super().__init__()
        self.self_attn, self.output = attention, original.self_attn.output
        self.self_attn_layer_norm, self.final_layer_norm = original.self_attn_layer_norm, original.final_layer_norm
        self.fc1, self.fc2, self.activation_fn = original.fc1, original.fc2, original.activation_fn

    def forward(self, hidden_states: torch.Tensor, mask: LayerMask) -> torch.Tensor:
        """Run the layer on [batch, tokens, hidden_size]."""
        attended, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), mask)
        hidden_states = hidden_states + self.output(attended)
        expanded = self.activation_fn(self.fc1(self.final_layer_norm(hidden_states)))
        hidden_states = hidden_states + self.fc2(expanded)
        if hidden_states.dtype == torch.float16:
            # States add up from layer to layer and can leave float16's range; transformers cuts them off there as well.
            largest = torch.finfo(torch.float16).max - 1000
            hidden_states = hidden_states.clamp(-largest, largest)
        return hidden_states


def _forward(
    encoder: Any, spec: BlockSparse | None, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
) -> BaseModelOutput:
    """The encoder's forward without steps for Hugging Face's attention; see `hdexport.families.big_bird`."""
    hidden_states = encoder.embed_tokens(input_ids) + encoder.embed_positions(input_ids.shape)

    def layers(states: torch.Tensor, mask: LayerMask) -> torch.Tensor:
        for layer in encoder.layers:
            states = layer(states, mask)
        return states

    hidden_states = run_layers(spec, hidden_states, attention_mask, layers)
    return BaseModelOutput(last_hidden_state=encoder.layernorm_embedding(hidden_states))


def _adapt(encoder: Any, conversion: BlockConversion | None = None) -> None:
    spec, tables = own_blocks(encoder, conversion)
    encoder.layers = torch.nn.ModuleList(
        _Layer(layer, BigBirdAttention(layer.self_attn.self, table))
        for layer, table in zip(encoder.layers, tables, strict=True)
    )
    encoder.forward = functools.partial(_forward, encoder, spec)


FAMILY = Family(
    tasks=(Task.FEATURE_EXTRACTION,),
    prepare=prepare_positions,
    embeddings=lambda encoder: encoder.embed_positions,
    # The encoder's and the decoder's, which are as long.
    position_table="embed_positions.weight",
    adapt=_adapt,
    native_attention=NativeAttention(attention_type="blocks", record=block_sparse, adapt=_adapt),
    as_trained=forget_short_texts,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_SPARSE,
)
