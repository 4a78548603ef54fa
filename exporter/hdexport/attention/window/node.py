"""Windowed attention in a traced model: the operator's node, and the mask that windowed layers share."""

from __future__ import annotations

__all__ = ["WindowMask", "asking_kinds", "sliding_window_node", "window_mask"]

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hdexport.attention.query_scale import LogScale, scaled
from hdexport.attention.symbolic import operator_node
from hdexport.attention.window.global_rows import GlobalRows, attend_to_all, find_global_rows, overwrite_rows
from hdexport.attention.window.record import Window
from hdplugins.attention.window.reference import sliding_window_attention


@dataclass(frozen=True)
class WindowMask:
    """The values that windowed layers share: made once, handed from layer to layer as the library's mask is.

    Attributes:
        window: the tokens that a token sees.
        token_kind: [batch, tokens], int32, 1 for local tokens, 2 for global ones, -1 for masked ones, which see the
            others and are not seen.
        global_rows: where the global tokens are; None without any.
        query_scale: [batch, 1, 1, 1], float32, factors of the queries of local tokens; None for none.
        global_scale: the same of global tokens.
    """

    window: Window
    token_kind: torch.Tensor
    global_rows: GlobalRows | None
    query_scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`."""
        attended = sliding_window_node(
            scaled(query, self.query_scale, tokens_first=False),
            key,
            value,
            self.token_kind,
            left=self.window.tokens,
            right=self.window.after,
            dilation=self.window.dilation,
            global_bound=self.window.global_tokens,
            scale=scale,
        )
        merged = attended.transpose(1, 2)  # [batch, tokens, heads, head_dim]
        if self.global_rows is None:
            return merged.contiguous()
        global_query = scaled(self.global_rows.of(query), self.global_scale, tokens_first=False)
        rows = attend_to_all(global_query, key, value, self.token_kind, scale=scale)
        return overwrite_rows(merged, rows.transpose(1, 2), self.global_rows)


def window_mask(window: Window, attention_mask: torch.Tensor, query_scale: LogScale | None = None) -> WindowMask:
    """The mask of layers with such a window.

    Args:
        window: the tokens that a token sees.
        attention_mask: [batch, tokens], bool, True for real tokens.
        query_scale: factor of the queries, by the keys that they see; None for none.
    """
    kinds = asking_kinds(attention_mask)
    factors = global_factors = None
    if query_scale is not None and query_scale.changes(window.most_keys):
        factors = query_scale.for_mask(attention_mask, window.most_keys)
    if not window.global_tokens:
        return WindowMask(window, kinds, None, factors)
    if query_scale is not None:
        global_factors = query_scale.for_mask(attention_mask)
    # The first real tokens, wherever padding is.
    is_first = attention_mask.to(torch.int32).cumsum(1) <= window.global_tokens
    kinds = torch.where(is_first & attention_mask, 2, kinds).to(torch.int32)
    return WindowMask(window, kinds, find_global_rows(kinds, window.global_tokens), factors, global_factors)


def asking_kinds(mask: torch.Tensor) -> torch.Tensor:
    """Kinds of tokens, int32, of a mask, bool, of any shape: masked tokens attend to others, as in the library.

    There, a row of padding is one that is computed and not seen; a model may give its vector all the same, as ColBERT
    does for the tokens that it adds to a query.
    """
    return 2 * mask.to(torch.int32) - 1


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
        key, value: [batch, kv_heads, tokens, head_dim]; see the operator.
        token_kind: [batch, tokens], int32; see the operator.
        left: steps that a window reaches before its query.
        right: steps that it reaches after its query.
        dilation: tokens per step, one value per head or a single one.
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
    return operator_node("SlidingWindowAttention", (query, key, value, token_kind), attributes)
