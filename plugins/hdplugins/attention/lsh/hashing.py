"""The hashes of LSH attention: which of several random directions a vector points to (angular LSH).

Attributes are checked without PyTorch, which a machine that only runs a bundle does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_hashes(rotations: Sequence[int], *, heads: int, head_dim: int, buckets: Sequence[int], rounds: int) -> None:
    """Refuse rotations and buckets that do not belong together.

    Args:
        rotations: shape of the rotations.
        heads: of the attention.
        head_dim: size of a head.
        buckets: factors of the number of buckets.
        rounds: of hashing.

    Raises:
        ValueError: it says what fits.
    """
    check_buckets(buckets, rounds)
    wanted = [heads, head_dim, rounds, sum(buckets) // 2]
    if list(rotations) != wanted:
        raise ValueError(f"rotations is {list(rotations)}; it must be [heads, head_dim, rounds, directions], {wanted}.")


def check_buckets(buckets: Sequence[int], rounds: int) -> None:
    """Refuse buckets and rounds that define nothing.

    Raises:
        ValueError: it says what fits.
    """
    if not buckets or any(factor < 2 or factor % 2 for factor in buckets):
        raise ValueError(f"buckets is {list(buckets)}; it must be even numbers of 2 or more.")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be 1 or more.")


def draw_rotations(seed: int, *, heads: int, head_dim: int, buckets: Sequence[int], rounds: int) -> torch.Tensor:
    """The rotations that Hugging Face's Reformer draws with a ``hash_seed``, the same for every layer.

    Args:
        seed: of PyTorch's generator.
        heads: of the attention.
        head_dim: size of a head.
        buckets: factors of the number of buckets, each even.
        rounds: of hashing.

    Returns:
        [heads, head_dim, rounds, sum(buckets) / 2], float32.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, head_dim, rounds, sum(buckets) // 2, generator=generator)


def hash_tokens(query_key: torch.Tensor, rotations: torch.Tensor, buckets: Sequence[int]) -> torch.Tensor:
    """The bucket of every token in every round, computed in float32 whatever the dtype.

    Each factor of the buckets has directions of its own and their opposites: the one with the largest product is the
    token's, the first of equal ones. The first factor counts single buckets, the second one groups of as many, and so
    on.

    Args:
        query_key: [batch, heads, tokens, head_dim].
        rotations: [heads, head_dim, rounds, sum(buckets) / 2], float32.
        buckets: factors of the number of buckets, each even.

    Returns:
        [batch, heads, rounds, tokens], int64, from 0 to the product of `buckets`, exclusive.
    """
    import torch

    products = torch.einsum("bhtd,hdrn->bhrtn", query_key.float(), rotations)
    parts = products.split([factor // 2 for factor in buckets], dim=-1)
    of_factor = [torch.cat([part, -part], dim=-1).argmax(-1) for part in parts]
    sizes = [math.prod(buckets[:number]) for number in range(len(buckets))]
    return torch.stack([size * found for size, found in zip(sizes, of_factor, strict=True)]).sum(0)
