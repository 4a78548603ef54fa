"""The semantics of chunk attention, in plain PyTorch.

Source: the ``LocalSelfAttention`` of Hugging Face's Reformer, outside of training.
"""

from __future__ import annotations

import torch

from hdplugins.attention.chunks.operator import OPERATOR, padded_tokens


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    *,
    chunk: int,
    before: int,
    after: int,
    multiple: int,
    causal: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention in which a chunk of queries sees the keys of its chunk and of chunks before and after it.

    The sequence is padded after its last token to a multiple of ``multiple`` tokens and split into chunks, which form a
    circle: the chunk before the first one is the last. See `neighbours` for sequences of few chunks. A key that is seen
    several times counts as several equal keys. A sequence of one chunk is attended to densely. Keys of padding are not
    seen, and with ``causal`` neither are keys after the query. The output of a padding token is 0.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key, value: [batch, tokens, heads, head_dim].
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        chunk: tokens of a chunk, 1 or more.
        before: number of chunks before its chunk that a query sees, 0 or more.
        after: number of chunks after its chunk that a query sees, 0 or more.
        multiple: tokens of which the length of a padded sequence is a multiple; a multiple of ``chunk``.
        causal: 1 if queries see no key after them, else 0.
        scale: factor of the scores, usually head_dim ** -0.5.

    Raises:
        ValueError: an attribute is out of its range.
    """
    OPERATOR.check(chunk=chunk, before=before, after=after, multiple=multiple, causal=causal)
    tokens = query.shape[1]
    padding = padded_tokens(tokens, multiple) - tokens
    query, key, value = (torch.nn.functional.pad(state, (0, 0, 0, 0, 0, padding)) for state in (query, key, value))
    real = torch.nn.functional.pad(token_mask != 0, (0, padding))  # [batch, padded]
    positions = torch.arange(tokens + padding, device=query.device)
    table = neighbours(len(positions) // chunk, before, after)

    def chunked(of_tokens: torch.Tensor, axis: int) -> torch.Tensor:
        return of_tokens.unflatten(axis, (-1, chunk))

    def seen(of_tokens: torch.Tensor, axis: int) -> torch.Tensor:
        """[..., chunks, keys of a chunk's queries, ...]"""
        return chunked(of_tokens, axis)[(slice(None),) * axis + (table,)].flatten(axis + 1, axis + 2)

    scores = torch.einsum("bcihd,bcjhd->bhcij", chunked(query, 1), seen(key, 1)) * scale
    hidden = ~seen(real, 1)[:, None, :, None, :]
    if causal:
        hidden = hidden | (seen(positions, 0)[:, None, :] > chunked(positions, 0)[:, :, None])
    # A query of padding may see nothing and have NaN for weights; it is defined as 0.
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    weights = weights.masked_fill(~chunked(real, 1)[:, None, :, :, None], 0.0)
    attended = torch.einsum("bhcij,bcjhd->bcihd", weights, seen(value, 1))
    return attended.flatten(1, 2)[:, :tokens]


def neighbours(chunks: int, before: int, after: int) -> torch.Tensor:
    """The chunks that each chunk sees, in order: [chunks, before + 1 + after], int64.

    They are counted in a circle, and a chunk may be seen several times. As in Hugging Face, a step of `chunks` or more
    leads nowhere: the chunk sees itself once more.
    """
    steps = [step if abs(step) < chunks else 0 for step in range(-before, after + 1)]
    return (torch.arange(chunks)[:, None] + torch.tensor(steps)) % chunks
