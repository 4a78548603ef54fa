"""Which sides local attention has beside its windows: blocks of tokens, also of texts with padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_reaches(*, radius: int, side_tokens: int, side_reach: int, has_sides: bool) -> None:
    """Refuse attributes that define nothing.

    Args:
        radius: attribute of the operator, as are the two below; see `reference`.
        side_tokens: likewise.
        side_reach: likewise.
        has_sides: whether there are side keys.

    Raises:
        ValueError: one is out of its range.
    """
    if radius < 0:
        raise ValueError(f"radius is {radius}; it must be 0 or more.")
    if has_sides and (side_tokens < 1 or side_reach < 1):
        raise ValueError(
            f"There are sides, and side_tokens is {side_tokens} and side_reach {side_reach}; both must be 1 or more."
        )
    if not has_sides and (side_tokens or side_reach):
        raise ValueError(
            f"There are no sides, but side_tokens is {side_tokens} and side_reach {side_reach}; both must be 0."
        )


def number_of_sides(tokens: int, side_tokens: int) -> int:
    """Side keys of a row of so many tokens; the last one is never seen if its block is not whole."""
    return (tokens + side_tokens - 1) // side_tokens


def whole_sides(token_mask: torch.Tensor, side_tokens: int) -> torch.Tensor:
    """How many sides each text has that are seen: [batch, 1], int64.

    A block counts if the token at its end is real; with n of them, sides 0 to n - 1 are seen. A real token belongs to
    the side of the block that it is in, or to side n - 1 if that is earlier. In a text without padding, or with padding
    on the right, the latter are the tokens that are left over at the end.

    All this is as in Hugging Face's LongT5, which counts places in the padded row: padding in front of a text, or in
    it, moves tokens to other sides, and such a text is not answered as it is alone.

    Args:
        token_mask: [batch, tokens], 0 for padding.
        side_tokens: tokens of a block.
    """
    import torch

    places = torch.arange(token_mask.shape[1], device=token_mask.device)
    is_end = places % side_tokens == side_tokens - 1
    return ((token_mask != 0) & is_end).to(torch.int64).sum(1, keepdim=True)
