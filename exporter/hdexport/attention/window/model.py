"""Windowed attention in PyTorch: the node of a traced model, the mask that windowed layers share, and the reference.

The reference that bundles with ``--attention window:...`` are compared with is a model's own attention under a mask for
every pair of tokens: PyTorch's attention and a mask, nothing of ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from hdexport.attention.model_parts import give_masks, operator_node
from hdexport.attention.query_scale import LogScale, scaled
from hdexport.attention.reference_attention import PairCounts, use_pair_counts
from hdexport.attention.window import Window
from hdexport.attention.window.global_rows import GlobalRows, attend_to_all, find_global_rows, overwrite_rows
from hdexport.model.memory_cache import MASK, MemoryCache, text_ends, updated_memory


@dataclass(frozen=True)
class WindowMask:
    """The values that windowed layers share: made once, handed from layer to layer as transformers' mask is.

    Attributes:
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
            scaled(query, self.query_scale),
            key,
            value,
            self.token_kind,
            left=self.window.tokens,
            right=self.window.after,
            dilation=self.window.dilation,
            global_bound=self.window.global_tokens,
            scale=scale,
        )
        if self.global_rows is None:
            return attended.contiguous()
        global_query = scaled(self.global_rows.of(query), self.global_scale)
        rows = attend_to_all(global_query, key, value, self.token_kind, scale=scale)
        return overwrite_rows(attended, rows, self.global_rows)


def window_mask(window: Window, attention_mask: torch.Tensor, query_scale: LogScale | None = None) -> WindowMask:
    """The mask of layers with such a window, for texts whose `attention_mask` is [batch, tokens], bool, True for real
    tokens.
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
    """Kinds of tokens, int32, of a mask, bool, of any shape: masked tokens attend to others, as in transformers.

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
    """One ``SlidingWindowAttention`` node; see `operator_node`.

    Args:
        query: [batch, tokens, heads, head_dim]; the result has the same shape and dtype.
        key, value: [batch, tokens, kv_heads, head_dim]; see the operator.
        token_kind: [batch, tokens], int32; see the operator.
        left: steps that a window reaches before its query.
        right: steps that it reaches after its query.
        dilation: tokens per step, one value per head or a single one.
        global_bound: the most global tokens of a text; 0 for none.
    """
    attributes = {
        "left": int(left),
        "right": int(right),
        "dilation": [int(step) for step in dilation],
        "global_bound": int(global_bound),
        "scale": float(scale),
    }
    return operator_node("SlidingWindowAttention", (query, key, value, token_kind), attributes)


@dataclass(frozen=True)
class RecurrentMask:
    """What windowed layers that see earlier segments share in a call.

    Each layer carries keys and values of the tokens before the text. The operator attends among as many queries as
    keys, so the memory's rows have queries of zeros, and their results are cut off. That costs (memory + tokens) /
    tokens of the attention itself, and nothing of the projections.

    Attributes:
        window: the tokens that a token sees; without global tokens.
        token_kind: [batch, memory + tokens], int32, 0 for memory that is not there yet, -1 for masked tokens, which see
            the others and are not seen, else 1.
        ends: [batch], int64, tokens of each text up to its last real one.
        memory_cache: memory of each layer, by the layer's number: [batch, memory, 2 * width], keys and, after them,
            values.
        layers: numbers of the layers that have not attended yet.
    """

    differs_by_layer: ClassVar[bool] = True
    """For `hdexport.graph.layer_deduplication`: no two layers have the same nodes."""

    window: Window
    token_kind: torch.Tensor
    ends: torch.Tensor
    memory_cache: MemoryCache
    layers: Iterator[int] = field(default_factory=itertools.count)

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`."""
        # Calls are counted, not modules: a model may use one layer several times.
        layer, heads, head_dim = next(self.layers), query.shape[2], query.shape[3]
        before = self.memory_cache.read(layer)
        states = torch.cat([key, value], dim=2).flatten(2)  # [batch, tokens, 2 * width]
        self.memory_cache.write(layer, updated_memory(before, states, self.ends))
        memory_cache = before.to(key.dtype).unflatten(2, (2 * heads, head_dim))
        keys, values = memory_cache.chunk(2, dim=2)  # [batch, memory, heads, head_dim]
        attended = sliding_window_node(
            torch.cat([torch.zeros_like(keys), query], dim=1),
            torch.cat([keys, key], dim=1),
            torch.cat([values, value], dim=1),
            self.token_kind,
            left=self.window.tokens,
            right=self.window.after,
            dilation=self.window.dilation,
            global_bound=0,
            scale=scale,
        )
        return attended[:, before.shape[1] :].contiguous()


def recurrent_mask(window: Window, attention_mask: torch.Tensor, memory_cache: MemoryCache) -> RecurrentMask:
    """The mask of layers with such a window; it leaves for the next call which tokens are in the memory.

    `attention_mask` is [batch, tokens], bool, True for real tokens.
    """
    there, ends = memory_cache.read(MASK), text_ends(attention_mask)
    memory_cache.write(MASK, updated_memory(there, attention_mask, ends))
    kinds = torch.cat([there.to(torch.int32), asking_kinds(attention_mask)], dim=1)
    return RecurrentMask(window, kinds, ends, memory_cache)


@dataclass(frozen=True)
class _Pairs(PairCounts):
    """The pairs of a query and a key that the query sees.

    Attributes:
        real: [batch, keys], bool; queries are the last of them.
        is_global: [batch, keys], bool.
        memory_cache: keys and values of the tokens before the queries; None for none.
        layers: numbers of the layers that have not attended yet.
    """

    window: Window
    real: torch.Tensor
    is_global: torch.Tensor
    memory_cache: MemoryCache | None = None
    layers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def before(self) -> int:
        """Keys before the first query."""
        return 0 if self.memory_cache is None else self.memory_cache.read(MASK).shape[1]

    def with_memory(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the memory are in front, [batch, memory, 2 * width]; see :class:`PairCounts`."""
        if self.memory_cache is None:
            return key, value
        layer, states = next(self.layers), torch.cat([key, value], dim=1).transpose(1, 2)
        memory = self.memory_cache.read(layer)
        ends = text_ends(self.real[:, self.before :])
        self.memory_cache.write(layer, updated_memory(memory, states.flatten(2), ends))
        both = torch.cat([memory.unflatten(2, states.shape[2:]), states], dim=1)  # [batch, keys, 2 * heads, head_dim]
        keys, values = both.transpose(1, 2).chunk(2, dim=1)
        return keys, values

    def of_queries(self, module: torch.nn.Module, queries: slice) -> torch.Tensor:
        """[batch, 1 or heads, queries, keys], 1 where a query sees a key, else 0; see :class:`PairCounts`."""
        places = torch.arange(self.real.shape[1])
        asking = places[self.before :][queries]
        offset = places[None, :] - asking[:, None]
        step = torch.tensor(self.window.dilation)[:, None, None]
        left, right = self.window.tokens * step, self.window.after * step
        near = ((offset >= -left) & (offset <= right) & (offset % step == 0))[None]
        seen = near | self.is_global[:, None, None, :] | self.is_global[:, None, asking, None]
        return (seen & self.real[:, None, None, :]).float()

    def keys(self) -> torch.Tensor:
        """[batch, 1, tokens, 1]: all keys for global tokens, a window's for others; see :class:`PairCounts`."""
        real = self.real.sum(1)[:, None, None, None]
        local = real.clamp(max=self.window.most_keys)
        return torch.where(self.is_global[:, None, self.before :, None], real, local)


def use_window_masks(model: PreTrainedModel, window: Window, memory_cache: MemoryCache | None = None) -> None:
    """Give a model's own attention, which transformers' attention interface reaches, a window, in place.

    With states that are carried from call to call, a window has no global tokens.
    """

    def pairs(attention_mask: torch.Tensor) -> _Pairs:
        if memory_cache is not None:
            before = memory_cache.read(MASK)
            memory_cache.write(MASK, updated_memory(before, attention_mask, text_ends(attention_mask)))
            attention_mask = torch.cat([before, attention_mask], dim=1)
        real = attention_mask.bool()
        return _Pairs(window, real, real & (real.long().cumsum(1) <= window.global_tokens), memory_cache)

    use_pair_counts(model)
    give_masks(model, pairs)
