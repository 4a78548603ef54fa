"""The semantics of local attention with relative position bias and side keys, in plain PyTorch.

Source: Guo et al., "LongT5: Efficient Sequence-To-Sequence Transformer for Long Sequences" (2022), section 3.1, and its
implementation in Hugging Face transformers.
"""

from __future__ import annotations

import torch

from hdplugins.attention.local_global.operator import OPERATOR, check_sides


def local_global_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    local_bias: torch.Tensor,
    side_key: torch.Tensor | None = None,
    side_value: torch.Tensor | None = None,
    side_bias: torch.Tensor | None = None,
    *,
    radius: int,
    side_tokens: int,
    side_reach: int,
    scale: float,
) -> torch.Tensor:
    """One softmax over the real tokens around a query and, if there are any, the sides of its sequence.

    The scores of query i, a real token, are::

        scale * query[i] . key[j] + local_bias[j - i + radius]              for real tokens j, |j - i| <= radius
        scale * query[i] . side_key[g] + side_bias[row]              for sides g < whole
        row = clip(g - side(i), -side_reach, side_reach) + side_reach
        side(i) = min(i // side_tokens, whole - 1)

    where ``whole`` is the number of real tokens at the end of a block of `side_tokens`; see `whole_sides`. A query that
    is padding has the result 0.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key, value: [batch, tokens, heads, head_dim].
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        local_bias: [heads, 2 * radius + 1], added to the scaled scores of tokens.
        side_key: [batch, sides, heads, head_dim], with ``sides = ceil(tokens / side_tokens)``; None for none.
        side_value: [batch, sides, heads, head_dim].
        side_bias: [heads, 2 * side_reach + 1], added to the scaled scores of sides.
        radius: tokens that a query sees on each side.
        side_tokens: tokens of a block; 0 where there are no sides.
        side_reach: the distance, in blocks, that all beyond it count as; 0 where there are no sides.
        scale: factor of the products of queries and keys.

    Raises:
        ValueError: an attribute is out of its range, or a table or the sides are of other sizes.
    """
    tokens = query.shape[1]
    has_sides = side_key is not None
    OPERATOR.check(radius=radius)
    check_sides(side_tokens=side_tokens, side_reach=side_reach, has_sides=has_sides)
    if local_bias.shape[1] != 2 * radius + 1:
        raise ValueError(f"local_bias has {local_bias.shape[1]} distances; a radius of {radius} has {2 * radius + 1}.")
    positions = torch.arange(tokens, device=query.device)
    row = positions[None, :] - positions[:, None] + radius  # [queries, keys]
    real = token_mask != 0
    hidden = ((row < 0) | (row > 2 * radius)) | ~real[:, None, None, :]  # [batch, 1, queries, keys]
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale + local_bias[:, row.clamp(0, 2 * radius)]
    scores, values = scores.masked_fill(hidden, -torch.inf), value
    if side_key is not None:
        assert side_value is not None
        assert side_bias is not None
        sides = number_of_sides(tokens, side_tokens)
        if side_key.shape[1] != sides or side_value.shape[1] != sides:
            raise ValueError(
                f"There are {side_key.shape[1]} side keys and {side_value.shape[1]} values; {tokens} tokens have "
                f"{sides} blocks of {side_tokens}."
            )
        if side_bias.shape[1] != 2 * side_reach + 1:
            raise ValueError(
                f"side_bias has {side_bias.shape[1]} distances; a reach of {side_reach} has {2 * side_reach + 1}."
            )
        whole = whole_sides(token_mask, side_tokens)  # [batch, 1]
        numbers = torch.arange(sides, device=query.device)
        own = torch.minimum(positions // side_tokens, whole - 1)  # [batch, tokens]
        distance = (numbers - own[:, :, None]).clamp(-side_reach, side_reach)  # [batch, tokens, sides]
        by_distance = side_bias[:, distance + side_reach].transpose(0, 1)
        side_scores = torch.einsum("bihd,bghd->bhig", query, side_key) * scale + by_distance
        side_scores = side_scores.masked_fill((numbers >= whole)[:, None, None, :], -torch.inf)
        scores, values = torch.cat([scores, side_scores], dim=-1), torch.cat([value, side_value], dim=1)
    # What padding sees is of no use; where it sees nothing, its weights are NaN.
    weights = torch.softmax(scores, dim=-1).masked_fill(~real[:, None, :, None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, values)


def number_of_sides(tokens: int, side_tokens: int) -> int:
    """Side keys of a row of so many tokens; the last one is never seen if its block is not whole."""
    return (tokens + side_tokens - 1) // side_tokens


def whole_sides(token_mask: torch.Tensor, side_tokens: int) -> torch.Tensor:
    """How many sides each sequence has that are seen: [batch, 1], int64.

    A block counts if the token at its end is real; with n of them, sides 0 to n - 1 are seen. A real token belongs to
    the side of the block that it is in, or to side n - 1 if that is earlier. In a sequence without padding, or with
    padding on the right, the latter are the tokens that are left over at the end.

    This is how Hugging Face's LongT5 computes it, which counts positions in the padded row: padding before a sequence
    or within it moves tokens to other sides, and the output of such a sequence differs from that of the sequence
    alone.

    Args:
        token_mask: [batch, tokens], 0 for padding.
        side_tokens: tokens of a block.
    """
    positions = torch.arange(token_mask.shape[1], device=token_mask.device)
    is_end = positions % side_tokens == side_tokens - 1
    return ((token_mask != 0) & is_end).to(torch.int64).sum(1, keepdim=True)
