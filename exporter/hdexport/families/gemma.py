"""EmbeddingGemma, 1 (``gemma3_text``) and 2: windows on both sides, heads that share keys, two rotary bases.

Both were trained in bfloat16, and their states go beyond float16's range, so that states are float32 between layers,
also with weights of another type.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.half_precision import FromStates, InFloat32, IntoStates, use_root_mean_squares
from hdexport.model.rotary import use_rotary_tables
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError


class _Embedding(torch.nn.Module):
    """Vectors of words times the root of their width, in float32: rounded to bfloat16, 27.71 is 27.75."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight, self.factor = original.weight, float(original.scalar_embed_scale)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden_size]."""
        return torch.nn.functional.embedding(input_ids, self.weight).float() * self.factor


def _use_wide_states(base: Any) -> None:
    """Make the states between layers float32, in place."""
    base.embed_tokens = _Embedding(base.embed_tokens)
    for layer in base.layers:
        dtype = layer.mlp.up_proj.weight.dtype
        for name in ("input_layernorm", "pre_feedforward_layernorm"):
            setattr(layer, name, FromStates(getattr(layer, name), dtype))
        layer.self_attn.o_proj = IntoStates(layer.self_attn.o_proj)
        layer.mlp.down_proj = IntoStates(layer.mlp.down_proj)
        if hasattr(layer, "ple_block"):
            for name in ("per_layer_input_gate", "per_layer_projection"):
                setattr(layer.ple_block, name, InFloat32(getattr(layer.ple_block, name)))
    if hasattr(base, "ple"):
        base.ple.per_layer_model_projection = InFloat32(base.ple.per_layer_model_projection)
        base.norm = FromStates(base.norm, base.embedding_projection.weight.dtype)


def _forward(
    base: Any, original: Any, *args: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any
) -> Any:
    """Gemma 3's forward with masks made here: transformers' come as functions that say causal or a window's width."""
    config = base.config
    make = functools.partial(
        ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation], attention_mask=attention_mask.bool()
    )
    # Its window ends one token earlier than the windows that transformers gives by their width.
    masks = {"full_attention": make(), "sliding_attention": make(local_size=config.sliding_window - 1)}
    return original(*args, input_ids=input_ids, attention_mask=masks, use_cache=False, **others)


def _adapt(model: PreTrainedModel) -> None:
    base: Any = model.base_model
    if model.config.model_type == "gemma3_text":
        if not model.config.use_bidirectional_attention:
            raise ModelError(
                "This gemma3_text attends to earlier tokens only, to generate text: its config.json has "
                "use_bidirectional_attention false.",
                hint="Use EmbeddingGemma, which attends to both sides, or a Qwen3-Embedding.",
            )
        base.forward = functools.partial(_forward, base, base.forward)
    use_rotary_tables(model)
    use_root_mean_squares(model)
    _use_wide_states(base)


def _token_width(config: Any) -> int:
    return int(config.hidden_size if config.model_type == "gemma3_text" else config.embedding_dim)


FAMILY = Family(
    tasks=(Task.FEATURE_EXTRACTION,),
    task_unsupported_reason=UnsupportedReason.NOT_TRAINED_FOR_TASK,
    learned_positions=False,
    scales_rope=True,
    token_width=_token_width,
    embeddings=lambda model: model.base_model,
    adapt=_adapt,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_WINDOWS,
)
