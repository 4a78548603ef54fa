"""A model's own attention made block-sparse by counting, for every pair of tokens, how often a query sees a key.

Bundles with ``--attention bigbird|etc|blocks`` are compared with this: PyTorch's attention and a bias for every
pair, nothing of our operators. Counts are made block by block, as the papers draw them.
"""

from __future__ import annotations

__all__ = ["use_block_masks"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hdexport.attention.blocks.record import LastBlock, Mode, Pattern
from hdexport.attention.blocks.setup import BlockSetup
from hdexport.attention.model_parts import Layers, attention_modules, wrap_layers
from hdexport.attention.pair_counts import PairCounts, use_pair_counts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLE = "block_table"
"""Buffer of a layer's attention: its table, or None."""


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
        table = getattr(module, _TABLE)
        return torch.stack([text.of_queries(table, queries) for text in self.texts])

    def keys(self) -> torch.Tensor:
        """[batch, 1, 1, 1]; see :class:`PairCounts`."""
        return torch.tensor([text.keys for text in self.texts])[:, None, None, None]


def use_block_masks(model: PreTrainedModel, setup: BlockSetup) -> None:
    """Make a model's own attention block-sparse, in place.

    Args:
        model: whose attention is reached through the library's attention interface.
        setup: of the bundle.
    """
    modules = attention_modules(model)
    for module, table in zip(modules, setup.tables(len(modules)), strict=True):
        module.register_buffer(_TABLE, table, persistent=False)
    rows = None if setup.global_embeddings is None else torch.from_numpy(setup.global_embeddings)

    def around(hidden_states: torch.Tensor, attention_mask: torch.Tensor, layers: Layers) -> torch.Tensor:
        extra = 0 if rows is None else len(rows)
        if rows is not None:
            hidden_states = torch.cat([rows.expand(len(hidden_states), -1, -1), hidden_states], dim=1)
        pairs = _Pairs([_text(setup, real, extra) for real in attention_mask.bool()])
        return layers(hidden_states, pairs)[:, extra:]

    use_pair_counts(model)
    wrap_layers(model, around)


def _text(setup: BlockSetup, real: torch.Tensor, extra: int) -> _Text:
    """The pairs of one text.

    Args:
        setup: the attention.
        real: [tokens], bool, without the global tokens in front.
        extra: global tokens in front.
    """
    spec, tokens = setup.spec, len(real)
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
        keys=len(places) if end - start <= spec.dense_tokens else min(len(places), setup.ordinary_keys),
    )
