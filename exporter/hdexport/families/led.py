"""LED's encoder: Longformer's attention in BART's layers, with positions that count from row 0."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

from hdexport.attention.window.attention_type import WindowConversion
from hdexport.families.longformer import LongformerAttention, attention_windows, longformer_tokens
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdruntime.bundle.manifest import Task


class _Positions(torch.nn.Module):
    """Positions of a model like BART with a table that can be replaced."""

    def __init__(self, original: torch.nn.Embedding) -> None:
        super().__init__()
        self.position_embeddings: torch.nn.Module = torch.nn.Embedding.from_pretrained(original.weight, freeze=False)

    def forward(self, input_ids_shape: torch.Size) -> torch.Tensor:
        """[1, tokens, hidden_size] for a [batch, tokens] shape; named as transformers' encoder calls it."""
        rows = torch.arange(input_ids_shape[1], device=next(self.parameters()).device)
        return self.position_embeddings(rows.unsqueeze(0))


def prepare_positions(encoder: Any) -> None:
    """Make the positions of an encoder like BART's a table that can be replaced, in place."""
    encoder.embed_positions = _Positions(encoder.embed_positions)


def _forward(
    encoder: Any,
    max_global: int,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    global_attention_mask: torch.Tensor,
    **_: Any,
) -> LEDEncoderBaseModelOutput:
    """The encoder's forward without steps for Hugging Face's attention: padding to the window, branches on the masks.

    The layers are written out as well, because the originals look for infinity in float16 after a normalisation, whose
    results are far from it.
    """
    tokens = longformer_tokens(attention_mask, global_attention_mask, max_global)
    hidden_states = encoder.embed_tokens(input_ids) + encoder.embed_positions(input_ids.shape)
    hidden_states = encoder.layernorm_embedding(hidden_states)
    for layer in encoder.layers:
        (attended,) = layer.self_attn.longformer_self_attn(hidden_states, attention_mask=tokens)
        hidden_states = layer.self_attn_layer_norm(hidden_states + layer.self_attn.output(attended))
        expanded = layer.activation_fn(layer.fc1(hidden_states))
        hidden_states = layer.final_layer_norm(hidden_states + layer.fc2(expanded))
    return LEDEncoderBaseModelOutput(last_hidden_state=hidden_states)


def _adapt(encoder: Any, conversion: WindowConversion) -> None:
    for layer in encoder.layers:
        attention = layer.self_attn
        attention.longformer_self_attn = LongformerAttention(attention.longformer_self_attn, conversion.bound)
    encoder.forward = functools.partial(_forward, encoder, conversion.bound)


def _padded_tokens(config: Any, tokens: int) -> int:
    # One for all layers, or one per layer.
    windows = config.attention_window
    window = windows if isinstance(windows, int) else max(windows)
    return -(-tokens // window) * window


FAMILY = Family(
    tasks=(Task.FEATURE_EXTRACTION,),
    prepare=prepare_positions,
    embeddings=lambda encoder: encoder.embed_positions,
    positions_key="max_encoder_position_embeddings",
    position_table="encoder.embed_positions.weight",
    padded_tokens=_padded_tokens,
    native_attention=NativeAttention(attention_type="window", record=attention_windows, adapt=_adapt),
    conversion_unsupported_reason=UnsupportedReason.NATIVE_SPARSE,
)
