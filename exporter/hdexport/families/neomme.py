"""NeoMME's text: windows of several widths, heads that share keys, and rotary positions of which texts use one axis.

Its images are patches at places of two axes, of which a graph of texts has none.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.half_precision import RootMeanSquareNorm
from hdexport.model.rotary import use_rotary_tables


class _ExclusiveAttention(torch.nn.Module):
    """Takes what lies along a token's own values out of its attention, as transformers does, and repeats no values."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.alpha = original.alpha

    def forward(self, attended: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads, head_dim], as `attended`; `values` are [batch, kv_heads, tokens, head_dim]."""
        kv_heads = values.shape[1]
        groups = attended.unflatten(2, (kv_heads, -1))  # [batch, tokens, kv_heads, heads / kv_heads, head_dim]
        unit = torch.nn.functional.normalize(values.transpose(1, 2).float(), dim=-1).to(attended.dtype)[:, :, :, None]
        along = (groups * unit).sum(-1, keepdim=True)
        share = torch.tanh(self.alpha).to(attended.dtype).view(kv_heads, -1, 1)
        return (groups - (share * along) * unit).flatten(2, 3)


def _use_norms(module: Any, width: int, *names: str) -> None:
    """Replace normalisations without a weight, in place, by one operator of ONNX Runtime's, which takes ones."""
    for name in names:
        original = getattr(module, name)
        setattr(module, name, RootMeanSquareNorm(original, weight=torch.ones(width), epsilon=original.eps))


def _adapt(model: PreTrainedModel) -> None:
    base: Any = model.base_model
    use_rotary_tables(model)
    hidden_size, head_dim = model.config.hidden_size, model.config.head_dim
    _use_norms(base, hidden_size, "embedding_norm", "final_norm")
    for layer in base.layers:
        _use_norms(layer, hidden_size, "input_layernorm", "post_attention_layernorm")
        _use_norms(layer.self_attn, head_dim, "q_norm", "k_norm")
        layer.self_attn.exclusive_self_attention = _ExclusiveAttention(layer.self_attn.exclusive_self_attention)


FAMILY = Family(
    learned_positions=False,
    scales_rope=True,
    embeddings=lambda model: model.base_model,
    adapt=_adapt,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_WINDOWS,
)
