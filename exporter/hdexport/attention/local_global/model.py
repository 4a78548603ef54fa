"""Local attention with sides in a traced model: the operator's node, and the sums that sides are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdexport.attention.model_parts import operator_node
from hdplugins.attention.local_global.reference import number_of_sides, whole_sides


def local_global_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    local_bias: torch.Tensor,
    side_key: torch.Tensor | None = None,
    side_value: torch.Tensor | None = None,
    side_bias: torch.Tensor | None = None,
    *,
    side_tokens: int,
    scale: float,
) -> torch.Tensor:
    """One ``LocalGlobalAttention`` node; see `operator_node`.

    Args:
        query, key, value: [batch, tokens, heads, head_dim]; the result has the same shape and dtype.
        token_mask: [batch, tokens], int32, 0 for padding.
        local_bias: [heads, 2 * radius + 1].
        side_key, side_value: [batch, sides, heads, head_dim]; None for none.
        side_bias: [heads, 2 * reach + 1].
        side_tokens: tokens of a side; 0 for no sides.
    """
    attributes = {
        "radius": (local_bias.shape[1] - 1) // 2,
        "side_tokens": side_tokens,
        "side_reach": 0 if side_bias is None else (side_bias.shape[1] - 1) // 2,
        "scale": float(scale),
    }
    inputs = [query, key, value, token_mask, local_bias]
    inputs += [each for each in (side_key, side_value, side_bias) if each is not None]
    return operator_node("LocalGlobalAttention", inputs, attributes)


@dataclass(frozen=True)
class LocalTokens:
    """The values that the layers of a model share for a batch of texts.

    Attributes:
        token_mask: [batch, tokens], int32, 0 for padding.
        side_tokens: tokens of a side; 0 for no sides.
    """

    token_mask: torch.Tensor
    side_tokens: int

    def side_sums(self, states: torch.Tensor) -> torch.Tensor:
        """Sums of the states, [batch, tokens, width], of each side's tokens: [batch, sides, width], float32.

        Blocks are contiguous, so each is summed for itself. The last whole side has all blocks from its own on: only
        these are summed twice, and there are few of them, but where padding is in a text or in front of it.
        """
        tokens, size = states.shape[1], self.side_tokens
        sides = number_of_sides(tokens, size)
        # Where, not a product: padding may hold any value.
        real = torch.where((self.token_mask != 0).unsqueeze(-1), states.float(), 0.0)
        whole_blocks = torch.nn.functional.pad(real, (0, 0, 0, sides * size - tokens))
        blocks = whole_blocks.unflatten(1, (sides, size)).sum(2)  # [batch, sides, width]
        last = (whole_sides(self.token_mask, size) - 1).unsqueeze(-1)  # [batch, 1, 1]
        numbers = torch.arange(sides, device=states.device).unsqueeze(-1)
        of_last = torch.where(numbers >= last, blocks, 0.0).sum(1, keepdim=True)
        return torch.where(numbers == last, of_last, blocks)
