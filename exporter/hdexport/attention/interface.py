"""The library's attention interface, mapped to nodes of our operators while a model is traced."""

from __future__ import annotations

__all__ = ["dense_attention_node", "sliding_window_node", "use_operators"]

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdexport.attention.blocks.node import block_sparse_node, through_blocks
from hdexport.attention.blocks.setup import BlockSetup
from hdexport.attention.model_parts import Layers, attention_modules, wrap_layers
from hdexport.attention.window.global_rows import GlobalRows, attend_to_all, find_global_rows, overwrite_rows
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION
from hdplugins.operators.dense_attention.reference import dense_attention
from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention
from hdruntime.bundle.manifest import BlockSparse, Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMPLEMENTATION = "hdexport"
"""Name under which the library's attention interface knows us."""


_LISTED_BLOCKS = "listed_blocks"
"""Buffer of a layer's attention: the operator's table."""


@dataclass(frozen=True)
class _WindowMask:
    """What windowed layers share: made once, handed from layer to layer as the library's mask is.

    Attributes:
        window: what a token sees.
        token_kind: [batch, tokens], int32, 0 for padding, 1 for local tokens, 2 for global ones.
        global_rows: where the global tokens are; None where there are none.
    """

    window: Window
    token_kind: torch.Tensor
    global_rows: GlobalRows | None


@dataclass(frozen=True)
class _BlockMask:
    """What block-sparse layers are given for a mask.

    Attributes:
        spec: what the attention is.
        token_mask: [batch, tokens], int32, 0 for padding.
    """

    spec: BlockSparse
    token_mask: torch.Tensor


def use_operators(model: PreTrainedModel, window: Window | None = None, blocks: BlockSetup | None = None) -> None:
    """Make every attention of the model call our operators, in place.

    Args:
        model: a model whose attention is reached through the library's attention interface.
        window: turns dense attention into windowed attention; None leaves each layer what it is.
        blocks: turns dense attention into block-sparse attention; None likewise.
    """
    if blocks is not None:
        _use_blocks(model, blocks)
    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, functools.partial(_mask_interface, window=window))
    model.config._attn_implementation = _IMPLEMENTATION


def dense_attention_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float,
) -> torch.Tensor:
    """One ``DenseAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key: [batch, heads, tokens, head_dim].
        value: [batch, heads, tokens, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        bias: [1 or batch, heads, tokens, tokens].
        scale: factor of the scores.
    """
    if not torch.compiler.is_exporting():
        return dense_attention(query, key, value, key_mask, bias, scale=scale)
    inputs = (query, key, value, key_mask) if bias is None else (query, key, value, key_mask, bias)
    return _node("DenseAttention", inputs, {"scale": float(scale)})


def sliding_window_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_kind: torch.Tensor,
    *,
    left: int,
    right: int,
    dilation: Sequence[int] = (1,),
    global_bound: int,
    scale: float,
) -> torch.Tensor:
    """One ``SlidingWindowAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        key: [batch, heads, tokens, head_dim].
        value: [batch, heads, tokens, head_dim].
        token_kind: [batch, tokens], int32, 0 for padding, 1 for local tokens, 2 for global ones.
        left: steps that a window reaches before its query.
        right: steps that it reaches after its query.
        dilation: tokens that a step is, one value a head or a single one.
        global_bound: the most global tokens of a text; 0 for none.
        scale: factor of the scores.
    """
    attributes = {
        "left": int(left),
        "right": int(right),
        "dilation": [int(step) for step in dilation],
        "global_bound": int(global_bound),
        "scale": float(scale),
    }
    if not torch.compiler.is_exporting():
        return sliding_window_attention(query, key, value, token_kind, **attributes)  # type: ignore[arg-type]
    return _node("SlidingWindowAttention", (query, key, value, token_kind), attributes)


def _node(name: str, inputs: Sequence[torch.Tensor], attributes: dict[str, Any]) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{ONNX_DOMAIN}::{name}",
        inputs,
        attrs=attributes,
        dtype=inputs[0].dtype,
        shape=inputs[0].shape,
        version=ONNX_DOMAIN_VERSION,
    )


def _attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _WindowMask | _BlockMask,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, _WindowMask):
        return _windowed_attention(query, key, value, attention_mask, scale), None
    if isinstance(attention_mask, _BlockMask):
        spec, token_mask, listed = attention_mask.spec, attention_mask.token_mask, getattr(module, _LISTED_BLOCKS, None)
        sparse = block_sparse_node(query, key, value, token_mask, listed, spec=spec, scale=scale)
        return sparse.transpose(1, 2).contiguous(), None
    attended = dense_attention_node(query, key, value, attention_mask, scale=scale)
    return attended.transpose(1, 2).contiguous(), None


def _use_blocks(model: PreTrainedModel, blocks: BlockSetup) -> None:
    """Give each attention its table, and the stack of layers the order of tokens that blocks count."""
    if blocks.listed_blocks is not None:
        for module, table in zip(attention_modules(model), blocks.listed_blocks, strict=True):
            module.register_buffer(_LISTED_BLOCKS, torch.from_numpy(table), persistent=False)
    spec, global_embeddings = blocks.spec, None
    if blocks.global_embeddings is not None:
        # A parameter of the model, so that it is a weight of the graph.
        global_embeddings = torch.nn.Parameter(torch.from_numpy(blocks.global_embeddings).to(model.dtype))
        model.register_parameter("global_embeddings", global_embeddings)

    def around(hidden_states: torch.Tensor, attention_mask: torch.Tensor, layers: Layers) -> torch.Tensor:
        def masked(states: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
            return layers(states, _BlockMask(spec, token_mask))

        return through_blocks(spec, hidden_states, attention_mask, masked, global_embeddings)

    wrap_layers(model, around)


def _windowed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: _WindowMask, scale: float
) -> torch.Tensor:
    window = mask.window
    attended = sliding_window_node(
        query,
        key,
        value,
        mask.token_kind,
        left=window.tokens,
        right=window.tokens,
        dilation=window.dilation,
        global_bound=window.global_tokens,
        scale=scale,
    )
    merged = attended.transpose(1, 2)  # [batch, tokens, heads, head_dim]
    if mask.global_rows is None:
        return merged.contiguous()
    rows = attend_to_all(mask.global_rows.of(query), key, value, mask.token_kind, scale=scale)
    return overwrite_rows(merged, rows.transpose(1, 2), mask.global_rows)


def _mask_interface(
    *_: Any, attention_mask: torch.Tensor, window: Window | None, local_size: int | None = None, **__: Any
) -> torch.Tensor | _WindowMask:
    """Hand the [batch, tokens] mask on as it is, or as kinds of tokens: no [tokens, tokens] mask is ever made.

    Args:
        attention_mask: [batch, tokens], bool, True for real tokens.
        window: what takes the place of dense attention.
        local_size: the library's word for layers whose own attention is windowed: the farthest token that one sees,
            on each side. (What such layers hand to the attention itself as ``sliding_window`` is one more.)
    """
    if local_size is not None:
        window = Window(tokens=local_size, global_tokens=0, dilation=(1,))
    if window is None:
        return attention_mask
    kinds = attention_mask.to(torch.int32)
    if not window.global_tokens:
        return _WindowMask(window, kinds, None)
    # The first real tokens, wherever padding is.
    kinds = torch.where(kinds.cumsum(1) <= window.global_tokens, 2 * kinds, kinds).to(torch.int32)
    return _WindowMask(window, kinds, find_global_rows(kinds, window.global_tokens))
