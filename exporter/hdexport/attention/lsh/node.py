"""LSH and chunk attention in a traced model: the operators' nodes, and the mask that converted layers share."""

from __future__ import annotations

__all__ = ["LshMask", "chunk_node", "lsh_node"]

from dataclasses import dataclass
from typing import Any

import torch

from hdexport.attention.lsh.record import Chunks, LshAttention
from hdexport.attention.symbolic import operator_node
from hdplugins.attention.chunks.reference import chunk_attention
from hdplugins.attention.lsh.reference import lsh_attention


def lsh_node(
    query_key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    rotations: torch.Tensor,
    *,
    record: LshAttention,
    scale: float,
) -> torch.Tensor:
    """One ``LSHAttention`` node while a graph is exported, its reference otherwise.

    Args:
        query_key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        rotations: [heads, head_dim, rounds, directions], float32.
        record: the attention.
        scale: factor of the scores.
    """
    assert record.hashed is not None
    assert record.hashes is not None
    attributes = _attributes(record, record.hashed, scale) | {
        "buckets": record.hashes.buckets,
        "rounds": record.hashes.rounds,
        "ends_by_row": int(record.converted),
    }
    if not torch.compiler.is_exporting():
        return lsh_attention(query_key, value, token_mask, rotations, **attributes)
    return operator_node("LSHAttention", (query_key, value, token_mask, rotations), attributes)


def chunk_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    *,
    record: LshAttention,
    scale: float,
) -> torch.Tensor:
    """One ``ChunkAttention`` node while a graph is exported, its reference otherwise; see `lsh_node`."""
    assert record.local is not None
    attributes = _attributes(record, record.local, scale)
    if not torch.compiler.is_exporting():
        return chunk_attention(query, key, value, token_mask, **attributes)
    return operator_node("ChunkAttention", (query, key, value, token_mask), attributes)


@dataclass(frozen=True)
class LshMask:
    """The mask of layers whose dense attention became LSH attention.

    Attributes:
        record: the attention.
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        rotations: [heads, head_dim, rounds, directions], float32.
    """

    record: LshAttention
    token_mask: torch.Tensor
    rotations: torch.Tensor

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim], of queries that are keys as well; see `LayerMask`."""
        attended = lsh_node(query, value, self.token_mask, self.rotations, record=self.record, scale=scale)
        return attended.transpose(1, 2).contiguous()


def _attributes(record: LshAttention, chunks: Chunks, scale: float) -> dict[str, Any]:
    return {
        "chunk": chunks.tokens,
        "before": chunks.before,
        "after": chunks.after,
        "multiple": record.multiple,
        "causal": int(record.causal),
        "scale": float(scale),
    }
