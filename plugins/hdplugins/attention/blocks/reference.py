"""The semantics of block-sparse attention, in plain PyTorch with dense masks."""

from __future__ import annotations

import torch

from hdplugins.attention.blocks.operator import OPERATOR, check_table


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    listed_blocks: torch.Tensor | None = None,
    *,
    block_size: int,
    first_global: int,
    last_global: int,
    window: int,
    first_repeats: int,
    dense_tokens: int,
    ends_by_row: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention in which a block of queries sees some blocks of keys, some of them more than once.

    A sequence ends after its last token, padding included, or, with ``ends_by_row``, after its last real token. It has
    the blocks 0 to B - 1 of ``block_size`` tokens up to there; the last may be shorter. A sequence that ends at
    ``dense_tokens`` or before is attended to densely: every query sees every real key. In others the queries of the
    first ``first_global`` blocks see every real key, and, if ``last_global``, so do those of block B - 1. A query of
    any other block i sees the real keys of

    * the first ``first_global`` blocks, block B - 1 if ``last_global``, and the blocks i - window to i + window, each
      block once, in however many of these ways;
    * block 0, ``first_repeats`` times more (BigBird's random blocks as Hugging Face evaluates them: all are block 0);
    * every block that row i - first_global of the table lists, once more each time it is listed.

    A key that is seen m times counts as m equal keys: its weight is multiplied by m before the softmax normalises.
    The query of a padding token, and one that sees no key, have the result 0.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key, value: [batch, tokens, heads, head_dim].
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        listed_blocks: [1 or heads, rows, listed], int32. Entries that are not blocks of the sequence list nothing, and
            neither do rows beyond the table.
        block_size: tokens of a block, 1 or more.
        first_global: blocks at the start that see all keys and that all queries see, 0 or more.
        last_global: 1 if the last block is such a block, else 0.
        window: blocks on each side of a query's own that it sees; -1 for none, not even its own.
        first_repeats: how many times more block 0 is seen, 0 or more.
        dense_tokens: the longest sequence that is attended to densely; 0 for none.
        ends_by_row: 1 if each sequence ends after its last real token, 0 if all end with the batch.
        scale: factor of the scores, usually head_dim ** -0.5.

    Raises:
        ValueError: an attribute is out of its range, or the table does not fit the heads.
    """
    tokens, heads = query.shape[1:3]
    OPERATOR.check(
        block_size=block_size,
        first_global=first_global,
        last_global=last_global,
        window=window,
        first_repeats=first_repeats,
        dense_tokens=dense_tokens,
    )
    if listed_blocks is not None:
        check_table(listed_blocks.shape, heads)
    real = token_mask != 0  # [batch, tokens]
    positions = torch.arange(tokens, device=query.device)
    ends = torch.full_like(token_mask[:, 0], tokens)
    if ends_by_row:
        ends = (real * (positions + 1)).amax(1)  # [batch]
    last = ((ends + block_size - 1) // block_size - 1)[:, None]  # [batch, 1]
    block = positions // block_size  # [tokens]

    keys_are_global = (block < first_global) | (bool(last_global) & (block == last))  # [batch, tokens]
    near = (block[:, None] - block[None, :]).abs() <= window  # [queries, keys]
    times = (near | keys_are_global[:, None, :]).to(query.dtype)[:, None]  # [batch, 1, queries, keys]
    times = times + first_repeats * (block == 0)
    if listed_blocks is not None:
        times = times + _times_listed(listed_blocks, block, first_global)
    sees_all = keys_are_global | (ends <= dense_tokens)[:, None]  # [batch, queries]
    times = torch.where(sees_all[:, None, :, None], 1, times) * real[:, None, None, :]

    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale + times.log()
    # A query that sees nothing has NaN for weights. Whatever padding and such queries hold, they are defined as 0.
    nothing = ~real[:, None, :, None] | (times.amax(-1, keepdim=True) == 0)
    weights = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, value)


def _times_listed(listed_blocks: torch.Tensor, block: torch.Tensor, first_global: int) -> torch.Tensor:
    """[1, 1 or heads, queries, keys], how often a query's row lists the key's block."""
    blocks = int(block[-1]) + 1
    table = listed_blocks.new_full((listed_blocks.shape[0], blocks, listed_blocks.shape[2]), -1)
    rows = min(listed_blocks.shape[1], max(blocks - first_global, 0))
    table[:, first_global : first_global + rows] = listed_blocks[:, :rows]
    of_query = table[:, block]  # [1 or heads, queries, listed]
    return (of_query[:, :, None, :] == block[None, None, :, None]).sum(-1)[None]
