"""A model's own attention made block-sparse by counting, for every pair of tokens, how often a query sees a key.

This is what bundles with ``--attention bigbird|etc|blocks`` are compared with: PyTorch's attention and a bias for every
pair, nothing of our operators. Counts are made block by block, as the papers draw them.
"""

from __future__ import annotations

__all__ = ["use_block_masks"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdexport.attention_modules import Layers, attention_modules, wrap_layers
from hdexport.block_setup import BlockSetup
from hdruntime.manifest import BlockSparse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "hdexport-block-masks"

_TABLE = "block_table"
"""Buffer of a layer's attention: its table, or None."""


@dataclass(frozen=True)
class _Pairs:
    """How often queries see keys.

    Attributes:
        times: [batch, tokens, tokens], without the tables.
        blocks: [batch, tokens], the block of each token, -1 for tokens of none.
        by_table: [batch, tokens], whether a query's row of its layer's table counts.
        real: [batch, tokens].
        first_row: the block of queries that the table's first row is of.
    """

    times: torch.Tensor
    blocks: torch.Tensor
    by_table: torch.Tensor
    real: torch.Tensor
    first_row: int


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
        return layers(hidden_states, _pairs(setup.spec, attention_mask.bool(), extra))[:, extra:]

    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_, attention_mask, **__: attention_mask)
    model.config._attn_implementation = _NAME
    wrap_layers(model, around)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Pairs,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    times = _with_table(attention_mask, getattr(module, _TABLE))  # [batch, heads or 1, queries, keys]
    seen = times.sum(-1, keepdim=True) > 0
    bias = torch.where(seen, times.log(), 0.0)
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return (attended * seen).transpose(1, 2).contiguous(), None


def _pairs(spec: BlockSparse, real: torch.Tensor, extra: int) -> _Pairs:
    """The pairs of a batch.

    Args:
        spec: what the attention is.
        real: [batch, tokens], bool, without the global tokens in front.
        extra: global tokens in front.
    """
    made = [_pairs_of_text(spec, text, extra) for text in real]
    times, blocks, by_table = (torch.stack(parts) for parts in zip(*made, strict=True))
    in_front = real.new_ones(len(real), extra)
    return _Pairs(times, blocks, by_table, torch.cat([in_front, real], 1), int(spec.kind == "bigbird"))


def _pairs_of_text(
    spec: BlockSparse, real: torch.Tensor, extra: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """times [tokens, tokens], blocks [tokens] and by_table [tokens] of one text."""
    tokens = len(real)
    places = real.nonzero().flatten().tolist() or [0]
    # Blocks count from the text's first token, and end with its last, or they are those of the batch.
    start, end = (places[0], places[-1] + 1) if spec.last_block == "row" else (0, tokens)
    count = -(-(end - start) // spec.block_size)
    blocks = torch.full((extra + tokens,), -1)
    blocks[extra + start : extra + end] = torch.arange(end - start) // spec.block_size
    of_blocks = torch.zeros(count, count)
    sees_all: Sequence[int] = ()
    if spec.kind != "blocks":
        for block in range(count):
            of_blocks[block, max(block - 1, 0) : block + 2] = 1
    if spec.kind == "bigbird":
        sees_all = range(count) if end - start <= spec.dense_tokens else (0, count - 1)
        of_blocks[:, [0, count - 1]] = 1
        if spec.mode == "hf_eval":
            of_blocks[:, 0] += spec.random_blocks
        of_blocks[list(sees_all)] = 1
    times = of_blocks[blocks][:, blocks]
    times[blocks < 0] = 0
    times[:, blocks < 0] = 0
    times[:extra] = 1
    times[:, :extra] = 1
    times[:, extra:] *= real
    by_table = (blocks >= 0) & ~torch.isin(blocks, torch.tensor(list(sees_all), dtype=torch.int64))
    return times, blocks, by_table


def _with_table(pairs: _Pairs, table: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads or 1, queries, keys], with what a layer's table, [1 or heads, rows, listed], lists."""
    times = pairs.times[:, None]
    if table is None:
        return times
    batch, tokens = pairs.blocks.shape
    listed = torch.zeros(batch, len(table), tokens, tokens)
    for text in range(batch):
        for query in range(tokens):
            row = int(pairs.blocks[text, query]) - pairs.first_row
            if pairs.by_table[text, query] and row < table.shape[1]:
                for place in range(table.shape[2]):
                    named = table[:, row, place]  # [1 or heads]
                    listed[text, :, query] += (pairs.blocks[text] == named[:, None]) & (named >= 0)[:, None]
    return times + listed * pairs.real[:, None, None, :]
