"""The semantics of disentangled attention, in plain PyTorch."""

from __future__ import annotations

import torch

from hdplugins.attention.disentangled.operator import OPERATOR


def disentangled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    position_keys: torch.Tensor,
    position_queries: torch.Tensor,
    row_of_distance: torch.Tensor,
    *,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention over the keys that are not padding, with products of both contents and their distance.

    Key j has the distance j - i from query i, and ``row = row_of_distance[clip(j - i, -reach, reach) + reach]``:

        scores[i, j] = scale * (query[i] . key[j] + query[i] . position_keys[row] + position_queries[row] . key[j])
        result[i] = sum over j of softmax(scores)[i, j] * value[j]

    A sequence without a single real key has no distribution to draw from: its results are 0 by definition.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key, value: [batch, tokens, heads, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        position_keys: [heads, rows, head_dim], what queries meet (the paper's c2p); zeros for nothing.
        position_queries: [heads, rows, head_dim], what meets keys (the paper's p2c); zeros for nothing.
        row_of_distance: [2 * reach + 1], int64, numbers of rows.
        reach: the distance, in tokens and 1 or more, that all beyond it count as.
        scale: factor of the scores.

    Raises:
        ValueError: the rows are not of that reach, or the tables differ in their shape.
    """
    OPERATOR.check(reach=reach)
    if row_of_distance.shape[0] != 2 * reach + 1:
        raise ValueError(
            f"row_of_distance has {row_of_distance.shape[0]} distances; a reach of {reach} has {2 * reach + 1}."
        )
    if position_keys.shape != position_queries.shape:
        raise ValueError(
            f"position_keys and position_queries are {list(position_keys.shape)} and {list(position_queries.shape)}; "
            "both are [heads, rows, head_dim]."
        )
    positions = torch.arange(query.shape[1], device=query.device)
    distance = (positions[None, :] - positions[:, None]).clamp(-reach, reach)  # [queries, keys]
    row = row_of_distance[distance + reach]
    scores = torch.einsum("bihd,bjhd->bhij", query, key)
    of_queries = torch.einsum("bihd,hrd->bhir", query, position_keys)
    of_keys = torch.einsum("hrd,bjhd->bhrj", position_queries, key)
    index = row.expand(*scores.shape)
    scores = (scores + of_queries.gather(3, index) + of_keys.gather(2, index)) * scale
    scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    # The scores of a sequence that is all padding are -inf, and their softmax is NaN: these rows are defined as 0.
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, value)
