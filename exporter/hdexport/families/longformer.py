"""Longformer: a window around every token, and global tokens with projections of their own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

from hdexport.attention.window.attention_type import WindowConversion
from hdexport.attention.window.global_rows import (
    GlobalRows,
    absorbs_projections,
    attend_through_projections,
    attend_to_all,
    find_global_rows,
    overwrite_rows,
)
from hdexport.attention.window.model import sliding_window_node
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdruntime.errors import ModelError, Setting


@dataclass(frozen=True)
class LongformerTokens:
    """The facts about a model's tokens that its layers share.

    `kind` is [batch, tokens], int32, 0 for padding, 1 for local tokens, 2 for global ones.
    """

    kind: torch.Tensor
    global_rows: GlobalRows


class LongformerAttention(torch.nn.Module):
    """The projections of Longformer's module, or LED's, around our operator, and the rows of the global tokens.

    The rows read `key_global` and `value_global` of every token, for at most `max_global` queries. Where queries are
    few, the projections move to their side; see `hdexport.attention.window.global_rows.attend_through_projections`.
    """

    def __init__(self, original: Any, max_global: int) -> None:
        super().__init__()
        self.query, self.key, self.value = original.query, original.key, original.value
        self.query_global = original.query_global
        self.num_heads, self.head_dim = int(original.num_heads), int(original.head_dim)
        # Hugging Face's window counts both sides of a token.
        self.window = int(original.one_sided_attn_window_size)
        self.max_global, self.scale = max_global, self.head_dim**-0.5
        self.absorbs = absorbs_projections(self.head_dim, slots=max_global)
        if self.absorbs:
            by_head = (self.num_heads, self.head_dim, -1)
            key, value = original.key_global.weight.detach(), original.value_global.weight.detach()
            self.key_weight = torch.nn.Parameter(key.view(by_head))
            self.value_weight = torch.nn.Parameter(value.view(by_head).transpose(1, 2).contiguous())
            self.value_bias = torch.nn.Parameter(original.value_global.bias.detach().view(self.num_heads, 1, -1))
        else:
            self.key_global, self.value_global = original.key_global, original.value_global

    def forward(self, hidden_states: torch.Tensor, attention_mask: LongformerTokens, **_: Any) -> tuple[torch.Tensor]:
        """Attend among [batch, tokens, hidden_size]; the arguments are named as the original's, which the layers around
        use.
        """
        tokens = attention_mask
        query, key, value = (self._split(project(hidden_states)) for project in (self.query, self.key, self.value))
        attended = sliding_window_node(
            query,
            key,
            value,
            tokens.kind,
            left=self.window,
            right=self.window,
            global_bound=self.max_global,
            scale=self.scale,
        )
        rows = self._global_rows(hidden_states, tokens)
        merged = overwrite_rows(attended, rows, tokens.global_rows)
        return (merged.flatten(2),)

    def _global_rows(self, hidden_states: torch.Tensor, tokens: LongformerTokens) -> torch.Tensor:
        """[batch, slots, heads, head_dim]."""
        query = self._split(self.query_global(tokens.global_rows.of(hidden_states)))
        if self.absorbs:
            return attend_through_projections(
                query,
                hidden_states,
                tokens.kind,
                key_weight=self.key_weight,
                value_weight=self.value_weight,
                value_bias=self.value_bias,
                scale=self.scale,
            )
        key, value = (self._split(project(hidden_states)) for project in (self.key_global, self.value_global))
        return attend_to_all(query, key, value, tokens.kind, scale=self.scale)

    def _split(self, merged: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden_size] as [batch, tokens, heads, head_dim]."""
        return merged.view(*merged.shape[:-1], self.num_heads, self.head_dim)


def longformer_tokens(
    attention_mask: torch.Tensor, global_attention_mask: torch.Tensor, max_global: int
) -> LongformerTokens:
    """Merge two masks, [batch, tokens], integers: 1 for real tokens, and 1 for global tokens, ignored where
    padding is.
    """
    kind = (attention_mask * (global_attention_mask + 1)).to(torch.int32)
    return LongformerTokens(kind, find_global_rows(kind, max_global))


def _forward(
    model: Any,
    max_global: int,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    global_attention_mask: torch.Tensor,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> LongformerBaseModelOutputWithPooling:
    """The model's forward without steps for Hugging Face's attention: padding to the window, branches on the masks."""
    tokens = longformer_tokens(attention_mask, global_attention_mask, max_global)
    hidden_states = model.embeddings(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)
    for layer in model.encoder.layer:
        (hidden_states,) = layer(hidden_states, attention_mask=tokens)
    return LongformerBaseModelOutputWithPooling(last_hidden_state=hidden_states)


def _adapt(model: PreTrainedModel, conversion: WindowConversion) -> None:
    base: Any = model.base_model
    for layer in base.encoder.layer:
        layer.attention.self = LongformerAttention(layer.attention.self, conversion.bound)
    base.forward = functools.partial(_forward, base, conversion.bound)


def attention_windows(config: Any) -> list[int] | int:
    """The windows that a checkpoint of Longformer's kind was trained with: both sides of a token together.

    A ModelError rejects windows with gaps, which transformers' code does not leave; its answers would be wrong.
    """
    dilation = getattr(config, "attention_dilation", None)
    steps = dilation if isinstance(dilation, (list, tuple)) else [1 if dilation is None else dilation]
    if any(step != 1 for step in steps):
        raise ModelError(
            f"config.json has attention_dilation {dilation}: windows with gaps, which transformers does not compute "
            f"for a {config.model_type}, so that there is nothing to compare with.",
            hint=("A similar model can be built: a RoBERTa with ", Setting("attention", "window:256,dilation:2")),
        )
    return config.attention_window


FAMILY = Family(
    padding_row=lambda config: int(config.pad_token_id),
    native_attention=NativeAttention(attention_type="window", record=attention_windows, adapt=_adapt),
    conversion_unsupported_reason=UnsupportedReason.NATIVE_SPARSE,
)
