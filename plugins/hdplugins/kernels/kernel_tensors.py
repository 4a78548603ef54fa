"""What the attention kernels' launchers ask of tensors before they hand out their addresses."""

from __future__ import annotations

__all__ = ["check_states", "check_token_mask"]

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_states(query: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse states that are not contiguous and alike.

    Args:
        query: [batch, heads, tokens, head_dim].
        others: name -> a tensor that is to be as `query` is.

    Raises:
        ValueError: it names the first that does not fit.
    """
    for name, tensor in {"query": query, **others}.items():
        if tensor.shape != query.shape or tensor.dtype != query.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}; query, "
                f"{', '.join(others)} are contiguous and alike, and query is {query.dtype} {list(query.shape)}."
            )


def check_token_mask(name: str, mask: torch.Tensor, query: torch.Tensor) -> None:
    """Refuse a mask, or kinds, of tokens that does not fit the queries.

    Args:
        name: of the tensor, for the message.
        mask: [batch, tokens], int32, contiguous.
        query: [batch, heads, tokens, head_dim].

    Raises:
        ValueError: it does not fit.
    """
    import torch  # which compilers do without

    wanted = [query.shape[0], query.shape[2]]
    if list(mask.shape) != wanted or mask.dtype != torch.int32 or not mask.is_contiguous():
        raise ValueError(f"{name} is {mask.dtype} {list(mask.shape)}, not contiguous torch.int32 {wanted}.")
