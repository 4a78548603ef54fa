"""The semantics of attention with a bucketed relative position bias, in plain PyTorch."""

from __future__ import annotations

import torch

from hdplugins.attention.distance.operator import OPERATOR


def clipped_distance_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    scores_by_distance: torch.Tensor,
    values_by_distance: torch.Tensor | None = None,
    *,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention over the keys that are not padding, with a number and a value for each distance.

    Key j has the distance j - i from query i, and the row ``clip(j - i, -reach, reach) + reach`` of both tables:

        scores[i, j] = scale * query[i] . key[j] + scores_by_distance[i, row]
        result[i] = sum over j of softmax(scores)[i, j] * (value[j] + values_by_distance[row])

    A sequence without a single real key has no distribution to draw from: its results are 0 by definition.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key, value: [batch, tokens, heads, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        scores_by_distance: [1 or batch, 1 or tokens, heads, 2 * reach + 1], added to the scaled scores.
        values_by_distance: [2 * reach + 1, head_dim], added to the values; None for none.
        reach: the distance, in tokens and 1 or more, that all beyond it count as.
        scale: factor of the products of queries and keys; `scores_by_distance` is not scaled.

    Raises:
        ValueError: the tables are not of that reach.
    """
    tokens = query.shape[1]
    OPERATOR.check(reach=reach)
    for name, rows in (
        ("scores_by_distance", scores_by_distance.shape[3]),
        ("values_by_distance", None if values_by_distance is None else values_by_distance.shape[0]),
    ):
        if rows not in (None, 2 * reach + 1):
            raise ValueError(f"{name} has {rows} distances; a reach of {reach} has {2 * reach + 1}.")
    positions = torch.arange(tokens, device=query.device)
    row = (positions[None, :] - positions[:, None]).clamp(-reach, reach) + reach  # [queries, keys]
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale
    bias = scores_by_distance.expand(*query.shape[:3], -1).transpose(1, 2)  # [batch, heads, queries, distances]
    scores = scores + bias.gather(3, row.expand(*scores.shape))
    scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    # The scores of a sequence that is all padding are -inf, and their softmax is NaN: these rows are defined as 0.
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    result = torch.einsum("bhij,bjhd->bihd", weights, value)
    if values_by_distance is not None:
        shares = torch.zeros_like(bias).scatter_add(3, row.expand(*weights.shape), weights)
        result = result + (shares @ values_by_distance).transpose(1, 2)
    return result
