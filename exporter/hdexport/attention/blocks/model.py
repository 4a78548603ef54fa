"""Block-sparse attention in PyTorch: the node of a traced model, tokens in the order of its blocks, and the reference.

The reference that bundles with ``--attention bigbird|etc|blocks`` are compared with is a model's own attention, with a
count for every pair of tokens, how often a query sees a key: PyTorch's attention and a bias, nothing of our operators.
Counts are made block by block, as the papers draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.blocks import BlockSparse, LastBlock, Mode, Pattern
from hdexport.attention.model_parts import Layers, attention_modules, operator_node, wrap_layers
from hdexport.attention.query_scale import LogScale, scaled
from hdexport.attention.reference_attention import PairCounts, use_pair_counts
from hdplugins.attention.blocks.reference import block_sparse_attention
from hdruntime.arrays import FloatArray

Tables = Callable[[int], list[torch.Tensor | None]]
"""The number of layers -> the table of each."""

LISTED_BLOCKS = "listed_blocks"
"""Buffer of a layer's attention: the operator's table, or None."""


def block_sparse_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    listed_blocks: torch.Tensor | None = None,
    *,
    spec: BlockSparse,
    scale: float,
) -> torch.Tensor:
    """One ``BlockSparseAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query, key, value: [batch, tokens, heads, head_dim]; the result has the same shape and dtype.
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        listed_blocks: [1 or heads, rows, listed], int32, for the modes ``table`` and ``lists``.
    """
    attributes: dict[str, Any] = _attributes(spec) | {"scale": float(scale)}
    if not torch.compiler.is_exporting():
        # Head by head: the definition holds every pair of tokens several times.
        attended = []
        for head in range(query.shape[2]):
            one = slice(head, head + 1)
            table = listed_blocks if listed_blocks is None or len(listed_blocks) == 1 else listed_blocks[one]
            states = (query[:, :, one], key[:, :, one], value[:, :, one])
            attended.append(block_sparse_attention(*states, token_mask, table, **attributes))
        return torch.cat(attended, dim=2)
    tables = () if listed_blocks is None else (listed_blocks,)
    return operator_node("BlockSparseAttention", (query, key, value, token_mask, *tables), attributes)


@dataclass(frozen=True)
class BlockMask:
    """The mask of block-sparse layers.

    Attributes:
        token_mask: [batch, tokens], int32, 0 for padding.
        query_scale: [batch, 1, 1, 1], float32, factors of the queries; None for none.
    """

    spec: BlockSparse
    token_mask: torch.Tensor
    query_scale: torch.Tensor | None = None

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`."""
        listed = getattr(module, LISTED_BLOCKS)
        query = scaled(query, self.query_scale)
        sparse = block_sparse_node(query, key, value, self.token_mask, listed, spec=self.spec, scale=scale)
        return sparse.contiguous()


def block_query_factors(
    spec: BlockSparse, query_scale: LogScale, attention_mask: torch.Tensor, ordinary_keys: int
) -> torch.Tensor:
    """The factors of the queries of texts, [batch, 1, 1, 1], float32, by the keys that most of a text's queries see.

    One factor serves all queries of a text. Queries of global blocks see more keys than it is made for. The global
    tokens that ``etc`` puts in front are no tokens of a text, and are not counted.

    Args:
        attention_mask: [batch, tokens], 0 for padding, of the text as it was given.
        ordinary_keys: maximum keys that a query of an ordinary block sees, in a text that is not attended to densely.
    """
    if not query_scale.changes(spec.dense_tokens):
        return query_scale.for_mask(attention_mask, ordinary_keys)
    tokens = torch.ones_like(attention_mask)
    if spec.last_block is LastBlock.ROW:
        # From each text's first real token to its last.
        tokens = attention_mask.cumsum(1).bool() & attention_mask.flip(1).cumsum(1).flip(1).bool()
    real = attention_mask.bool().float().sum(1)
    is_dense = tokens.sum(1) <= spec.dense_tokens
    return query_scale.of(torch.where(is_dense, real, real.clamp(max=ordinary_keys)))


def through_blocks(
    spec: BlockSparse,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    layers: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    global_embeddings: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run layers on tokens in the order of the blocks: padding on the left moves to the end, global tokens
    come first.

    Except for attention, tokens are computed one by one, so the order is changed once, and not in every layer. Where
    blocks are the padded batch's, the order stays.

    Args:
        hidden_states: [batch, tokens, width]; the result has as many rows, in the order given.
        attention_mask: [batch, tokens], 0 for padding.
        layers: (hidden states, token mask as the operator wants it) -> hidden states, [batch, tokens, ...].
        global_embeddings: [global tokens, width], of the pattern ``etc``.
    """
    token_mask = attention_mask.to(torch.int32)
    order = None if spec.last_block is LastBlock.PADDED else _RealTokensFirst(token_mask)
    if order is not None:
        hidden_states, token_mask = order.apply(hidden_states), order.apply(token_mask)
    if global_embeddings is not None:
        hidden_states, token_mask = _with_global_tokens(spec, hidden_states, token_mask, global_embeddings)
    hidden_states = layers(hidden_states, token_mask)
    if global_embeddings is not None:
        hidden_states = hidden_states[:, _global_blocks(spec) * spec.block_size :]
    return hidden_states if order is None else order.undo(hidden_states)


class _RealTokensFirst:
    """Rotates each text so that its first real token comes first, and padding from the left after it.

    `token_mask` is [batch, tokens], 0 for padding.
    """

    def __init__(self, token_mask: torch.Tensor) -> None:
        batch, tokens = token_mask.shape
        place = torch.arange(tokens, device=token_mask.device)
        # [batch, 1], padding before the text; a row of nothing else makes a full turn.
        first = (token_mask.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
        rows = torch.arange(batch, device=token_mask.device).unsqueeze(1) * tokens
        self._forth = (rows + _wrapped(place + first, tokens)).flatten()
        self._back = (rows + _wrapped(place + tokens - first, tokens)).flatten()

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, ...] in the order of the blocks."""
        return values.flatten(0, 1)[self._forth].view(values.shape)

    def undo(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, ...] in the order given."""
        return values.flatten(0, 1)[self._back].view(values.shape)


def _wrapped(place: torch.Tensor, tokens: int) -> torch.Tensor:
    """Places from 0 to 2 * tokens - 1 as places in the text; the exporter knows no remainder by a length."""
    return torch.where(place >= tokens, place - tokens, place)


def _with_global_tokens(
    spec: BlockSparse, hidden_states: torch.Tensor, token_mask: torch.Tensor, global_embeddings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the global tokens first; the rest of their last block is padding."""
    batch = hidden_states.shape[0]
    unused = _global_blocks(spec) * spec.block_size - spec.global_tokens
    rows = torch.nn.functional.pad(global_embeddings.to(hidden_states.dtype), (0, 0, 0, unused))
    mask = torch.nn.functional.pad(token_mask.new_ones(spec.global_tokens), (0, unused))
    return (
        torch.cat([rows.expand(batch, -1, -1), hidden_states], dim=1),
        torch.cat([mask.expand(batch, -1), token_mask], dim=1),
    )


def _global_blocks(spec: BlockSparse) -> int:
    return -(-spec.global_tokens // spec.block_size)


def _attributes(spec: BlockSparse) -> dict[str, int]:
    """The operator's attributes but its scale."""
    is_bigbird = spec.pattern is Pattern.BIGBIRD
    return {
        "block_size": spec.block_size,
        "first_global": 1 if is_bigbird else _global_blocks(spec),
        "last_global": int(is_bigbird),
        "window": -1 if spec.pattern is Pattern.BLOCKS else 1,
        "first_repeats": spec.random_blocks if spec.mode is Mode.HF_EVAL else 0,
        "dense_tokens": spec.dense_tokens,
        "ends_by_row": int(spec.last_block is LastBlock.ROW),
    }


@dataclass(frozen=True, kw_only=True)
class _Text:
    """How often the blocks of one text see each other; the last of each axis stands for tokens of no block.

    Attributes:
        times: [blocks + 1, blocks + 1], without the tables.
        by_table: [blocks + 1], whether a block's row of its layer's table counts.
        block_of_token: [tokens], with the global tokens in front, which are of no block.
        real: [tokens].
        in_front: global tokens in front.
        first_row: the block of queries that the table's first row is of.
        keys: tokens of the text that a query of an ordinary block sees.
    """

    times: torch.Tensor
    by_table: torch.Tensor
    block_of_token: torch.Tensor
    real: torch.Tensor
    in_front: int
    first_row: int
    keys: int

    def with_table(self, table: torch.Tensor | None) -> torch.Tensor:
        """[1 or heads, blocks + 1, blocks + 1], with the pairs in a layer's table, [1 or heads, rows, listed]."""
        if table is None:
            return self.times[None]
        none = len(self.times) - 1
        listed = torch.zeros(len(table), none + 1, none + 1)
        rows = min(table.shape[1], max(none - self.first_row, 0))
        named = table[:, :rows].long()
        named = torch.where((named >= 0) & (named < none), named, none)
        listed[:, self.first_row : self.first_row + rows].scatter_add_(2, named, torch.ones(named.shape))
        listed[..., none] = 0
        return self.times + listed * self.by_table[:, None]

    def of_queries(self, table: torch.Tensor | None, queries: slice) -> torch.Tensor:
        """[1 or heads, queries, tokens]."""
        block = self.block_of_token
        times = self.with_table(table)[:, block[queries]][:, :, block]
        times[:, : max(self.in_front - queries.start, 0)] = 1
        times[:, :, : self.in_front] = 1
        return times * self.real


@dataclass(frozen=True)
class _Pairs(PairCounts):
    """How often queries see keys, for each text of a batch."""

    texts: Sequence[_Text]

    def of_queries(self, module: torch.nn.Module, queries: slice) -> torch.Tensor:
        """[batch, 1 or heads, queries, tokens]; see :class:`PairCounts`."""
        table = getattr(module, LISTED_BLOCKS)
        return torch.stack([text.of_queries(table, queries) for text in self.texts])

    def keys(self) -> torch.Tensor:
        """[batch, 1, 1, 1]; see :class:`PairCounts`."""
        return torch.tensor([text.keys for text in self.texts])[:, None, None, None]


def give_tables(model: PreTrainedModel, tables: Tables) -> None:
    """Give each attention that transformers' attention interface reaches its table, as the buffer `LISTED_BLOCKS`."""
    modules = attention_modules(model)
    for module, table in zip(modules, tables(len(modules)), strict=True):
        module.register_buffer(LISTED_BLOCKS, table, persistent=False)


def use_block_masks(
    model: PreTrainedModel,
    spec: BlockSparse,
    *,
    ordinary_keys: int,
    tables: Tables,
    global_embeddings: FloatArray | None,
) -> None:
    """Make a model's own attention, which transformers' attention interface reaches, block-sparse, in place.

    Args:
        ordinary_keys: tokens that a query of an ordinary block sees at most.
        global_embeddings: [global_tokens, hidden_size], the layers' inputs for global tokens; None for none.
    """
    give_tables(model, tables)
    rows = None if global_embeddings is None else torch.from_numpy(global_embeddings)

    def around(hidden_states: torch.Tensor, attention_mask: torch.Tensor, layers: Layers) -> torch.Tensor:
        extra = 0 if rows is None else len(rows)
        if rows is not None:
            hidden_states = torch.cat([rows.expand(len(hidden_states), -1, -1), hidden_states], dim=1)
        texts = [_text(spec, real, extra, ordinary_keys) for real in attention_mask.bool()]
        return layers(hidden_states, _Pairs(texts))[:, extra:]

    use_pair_counts(model)
    wrap_layers(model, around)


def _text(spec: BlockSparse, real: torch.Tensor, extra: int, ordinary_keys: int) -> _Text:
    """The pairs of one text, whose real tokens are [tokens], bool, with `extra` global tokens in front."""
    tokens = len(real)
    places = real.nonzero().flatten().tolist() or [0]
    # Blocks count from the text's first token, and end with its last, or they are the batch's blocks.
    start, end = (places[0], places[-1] + 1) if spec.last_block is LastBlock.ROW else (0, tokens)
    count = -(-(end - start) // spec.block_size)
    block_of_token = torch.full((extra + tokens,), count)
    block_of_token[extra + start : extra + end] = torch.arange(end - start) // spec.block_size
    times = torch.zeros(count + 1, count + 1)
    sees_all: Sequence[int] = ()
    if spec.pattern is not Pattern.BLOCKS:
        for block in range(count):
            times[block, max(block - 1, 0) : block + 2] = 1
    if spec.pattern is Pattern.BIGBIRD:
        sees_all = range(count) if end - start <= spec.dense_tokens else (0, count - 1)
        times[:, [0, count - 1]] = 1
        if spec.mode is Mode.HF_EVAL:
            times[:, 0] += spec.random_blocks
        times[list(sees_all)] = 1
    times[count], times[:, count] = 0, 0
    by_table = torch.ones(count + 1)
    by_table[[*sees_all, count]] = 0
    return _Text(
        times=times,
        by_table=by_table,
        block_of_token=block_of_token,
        real=torch.cat([real.new_ones(extra), real]),
        in_front=extra,
        first_row=int(spec.pattern is Pattern.BIGBIRD),
        keys=len(places) if end - start <= spec.dense_tokens else min(len(places), ordinary_keys),
    )
