"""The semantics of LSH attention, in plain PyTorch.

Source: the ``LSHSelfAttention`` of Hugging Face's Reformer, outside of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hdplugins.attention.chunks.operator import padded_tokens
from hdplugins.attention.chunks.reference import neighbours
from hdplugins.attention.lsh.operator import OPERATOR, check_rotations

_EPSILON = 1e-6
"""Added to a key's mean square."""


def lsh_attention(
    query_key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    rotations: torch.Tensor,
    *,
    chunk: int,
    before: int,
    after: int,
    buckets: Sequence[int],
    rounds: int,
    multiple: int,
    causal: int,
    ends_by_row: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention among tokens whose hashes are alike.

    In each round the tokens are sorted by bucket and then by position, and padding comes last. The sequence is padded
    to a multiple of ``multiple`` tokens, and the sorted tokens are split into chunks. The chunks of all rounds, one
    round after the other, form a circle, in which a chunk sees itself and the chunks before and after it: the first
    chunk of a round sees the last chunk of the previous round. With ``ends_by_row`` a round has the chunks of the
    padded length of each sequence, otherwise the chunks of the padded length of the batch. A chunk may have tokens of
    several buckets, and queries see all of it.

    A key is the query_key of its token divided by its root mean square. A query sees no key of padding, not the key of
    its token, and with ``causal`` no key after it; it sees the key of its token if it sees no other key in any round. A
    key that is seen several times counts as several equal keys. The results of the rounds are weighted by their sums of
    exponentials. The result of a padding token is 0.

    Args:
        query_key: [batch, tokens, heads, head_dim], any float dtype, the queries, and the keys before normalisation;
            which is also the shape and dtype of the output.
        value: [batch, tokens, heads, head_dim].
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        rotations: [heads, head_dim, rounds, sum(buckets) / 2], float32; see `hash_tokens`.
        chunk: tokens of a chunk, 1 or more.
        before: number of chunks before its chunk that a query sees, 0 or more.
        after: number of chunks after its chunk that a query sees, 0 or more.
        buckets: factors of the number of buckets, each even.
        rounds: number of rounds of hashing, 1 or more.
        multiple: tokens of which the length of a padded sequence is a multiple; a multiple of ``chunk``.
        causal: 1 if queries see no key after them, else 0.
        ends_by_row: 1 if each sequence ends after as many tokens as it has real ones, 0 if all end with the batch.
        scale: factor of the scores, usually head_dim ** -0.5.

    Raises:
        ValueError: an attribute is out of its range, or the rotations do not fit.
    """
    tokens, heads, head_dim = query_key.shape[1:]
    OPERATOR.check(
        chunk=chunk,
        before=before,
        after=after,
        buckets=buckets,
        rounds=rounds,
        multiple=multiple,
        causal=causal,
        ends_by_row=ends_by_row,
    )
    check_rotations(rotations.shape, heads=heads, head_dim=head_dim, buckets=buckets, rounds=rounds)
    padded = padded_tokens(tokens, multiple)
    real = torch.nn.functional.pad(token_mask != 0, (0, padded - tokens))  # [batch, padded]
    query, value = (
        torch.nn.functional.pad(state.transpose(1, 2), (0, 0, 0, padded - tokens)) for state in (query_key, value)
    )  # [batch, heads, padded, head_dim]
    buckets_of_tokens = torch.nn.functional.pad(hash_tokens(query_key, rotations, buckets), (0, padded - tokens))
    sorting = torch.where(real[:, None, None], buckets_of_tokens, math.prod(buckets))  # [batch, heads, rounds, padded]
    order = sorting.argsort(stable=True, dim=-1)
    chunks = order.flatten(2).unflatten(2, (-1, chunk))  # [batch, heads, chunks of all rounds, chunk]
    ends = real.sum(1).tolist() if ends_by_row else [padded] * len(real)
    tables = [_table(max(end, 1), padded, chunk, before, after, rounds, multiple) for end in ends]
    keys = torch.stack([of_row[:, table].flatten(2) for of_row, table in zip(chunks, tables, strict=True)])

    def rows(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[batch, heads, chunks, positions of a chunk, head_dim]"""
        index = positions.flatten(2)[..., None].expand(-1, -1, -1, states.shape[-1])
        return states.gather(2, index).unflatten(2, positions.shape[2:])

    normalised = query * (query.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()
    scores = torch.einsum("bhcid,bhcjd->bhcij", rows(query, chunks), rows(normalised, keys)) * scale
    of_query, of_key = chunks[..., :, None], keys[..., None, :]
    texts = torch.arange(len(real), device=real.device)[:, None, None, None]
    hidden = ~real[texts, keys][..., None, :] | (of_key == of_query)
    if causal:
        hidden = hidden | (of_key > of_query)
    scores = scores.masked_fill(hidden, -torch.inf)
    # What a round finds, in the order of the sequence, and its weight among the rounds, -inf where it sees nothing.
    back = order.argsort(-1)
    shares = torch.einsum("bhcij,bhcjd->bhcid", torch.softmax(scores, dim=-1).nan_to_num(), rows(value, keys))
    shares = (
        shares.flatten(2, 3).unflatten(2, (rounds, padded)).gather(3, back[..., None].expand(-1, -1, -1, -1, head_dim))
    )
    sums = scores.logsumexp(-1).flatten(2, 3).unflatten(2, (rounds, padded)).gather(3, back)
    weights = torch.softmax(sums, dim=2)[..., None]
    attended = torch.where(weights.isnan().any(2), value, (weights.nan_to_num() * shares).sum(2))
    return (attended * real[:, None, :, None])[:, :, :tokens].transpose(1, 2)


def _table(end: int, padded: int, chunk: int, before: int, after: int, rounds: int, multiple: int) -> torch.Tensor:
    """Return the chunks that each chunk sees, [chunks of all rounds, before + 1 + after]; `end` tokens are real."""
    of_batch, own = padded // chunk, padded_tokens(end, multiple) // chunk
    seen = neighbours(rounds * own, before, after)
    table = torch.zeros(rounds, of_batch, before + 1 + after, dtype=torch.int64)
    table[:, :own] = (seen // own * of_batch + seen % own).unflatten(0, (rounds, own))
    return table.flatten(0, 1)


def draw_rotations(seed: int, *, heads: int, head_dim: int, buckets: Sequence[int], rounds: int) -> torch.Tensor:
    """The rotations that Hugging Face's Reformer draws with a ``hash_seed``, the same for every layer.

    Args:
        seed: seed of PyTorch's generator.
        heads: number of attention heads.
        head_dim: size of a head.
        buckets: factors of the number of buckets, each even.
        rounds: number of rounds of hashing.

    Returns:
        [heads, head_dim, rounds, sum(buckets) / 2], float32.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, head_dim, rounds, sum(buckets) // 2, generator=generator)


def hash_tokens(query_key: torch.Tensor, rotations: torch.Tensor, buckets: Sequence[int]) -> torch.Tensor:
    """The bucket of every token in every round, computed in float32 whatever the dtype.

    Each factor of the buckets has directions of its own and their opposites: the one with the largest product is the
    token's, the first of equal ones. The first factor counts single buckets, the second one groups of as many, and so
    on.

    Args:
        query_key: [batch, tokens, heads, head_dim].
        rotations: [heads, head_dim, rounds, sum(buckets) / 2], float32.
        buckets: factors of the number of buckets, each even.

    Returns:
        [batch, heads, rounds, tokens], int64, from 0 to the product of `buckets`, exclusive.
    """
    products = torch.einsum("bthd,hdrn->bhrtn", query_key.float(), rotations)
    parts = products.split([factor // 2 for factor in buckets], dim=-1)
    of_factor = [torch.cat([part, -part], dim=-1).argmax(-1) for part in parts]
    sizes = [math.prod(buckets[:number]) for number in range(len(buckets))]
    return torch.stack([size * found for size, found in zip(sizes, of_factor, strict=True)]).sum(0)
