"""Block-sparse attention in a traced model: the operator's node, and the tokens in the order that its blocks count."""

from __future__ import annotations

__all__ = ["LISTED_BLOCKS", "BlockMask", "block_query_factors", "block_sparse_node", "through_blocks"]

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hdexport.attention.blocks.record import BlockSparse, LastBlock, Mode, Pattern
from hdexport.attention.query_scale import LogScale, scaled
from hdexport.attention.symbolic import operator_node
from hdplugins.attention.blocks.reference import block_sparse_attention

LISTED_BLOCKS = "listed_blocks"
"""Buffer of a layer's attention: the operator's table."""


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
        query, key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        listed_blocks: [1 or heads, rows, listed], int32, for the modes ``table`` and ``lists``.
        spec: the attention.
        scale: factor of the scores.
    """
    attributes: dict[str, Any] = _attributes(spec) | {"scale": float(scale)}
    if not torch.compiler.is_exporting():
        # Head by head: the definition holds every pair of tokens several times.
        attended = []
        for head in range(query.shape[1]):
            one = slice(head, head + 1)
            table = listed_blocks if listed_blocks is None or len(listed_blocks) == 1 else listed_blocks[one]
            states = (query[:, one], key[:, one], value[:, one])
            attended.append(block_sparse_attention(*states, token_mask, table, **attributes))
        return torch.cat(attended, dim=1)
    tables = () if listed_blocks is None else (listed_blocks,)
    return operator_node("BlockSparseAttention", (query, key, value, token_mask, *tables), attributes)


@dataclass(frozen=True)
class BlockMask:
    """The mask of block-sparse layers.

    Attributes:
        spec: the attention.
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
        listed = getattr(module, LISTED_BLOCKS, None)
        query = scaled(query, self.query_scale)
        sparse = block_sparse_node(query, key, value, self.token_mask, listed, spec=self.spec, scale=scale)
        return sparse.transpose(1, 2).contiguous()


def block_query_factors(
    spec: BlockSparse, query_scale: LogScale, attention_mask: torch.Tensor, ordinary_keys: int
) -> torch.Tensor:
    """The factors of the queries of texts, by the keys that most of a text's queries see.

    One factor serves all queries of a text. Queries of global blocks see more keys than it is made for. The global
    tokens that ``etc`` puts in front are no tokens of a text, and are not counted.

    Args:
        spec: the attention.
        query_scale: factor of the queries, by the keys that they see.
        attention_mask: [batch, tokens], 0 for padding, of the text as it was given.
        ordinary_keys: that a query of an ordinary block sees at most, in a text that is not attended to densely.

    Returns:
        [batch, 1, 1, 1], float32.
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
    """Run layers on tokens in the order of the blocks: padding on the left moves to the end, global tokens come first.

    Except for attention, tokens are computed one by one, so the order is changed once, and not in every layer.

    Args:
        spec: the attention. Where its blocks are the padded batch's, the order stays.
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

    Args:
        token_mask: [batch, tokens], 0 for padding.
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
