"""How far the estimate of FAVOR+ is from the softmax attention that it stands for."""

from __future__ import annotations

__all__ = ["estimate_error"]

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdexport.attention.favor.model import FeatureAttention


def estimate_error(model: PreTrainedModel, attention: FeatureAttention, input_ids: torch.Tensor) -> Iterator[str]:
    """A line on the relative error of all layers' attention, each on the output of the layers before it.

    The error is the length of the difference to softmax attention of the same queries, keys and values, divided by that
    one's length, over all heads and tokens of a text.

    Args:
        model: whose layers call the attention.
        attention: FAVOR+.
        input_ids: [1, tokens].
    """
    errors: list[torch.Tensor] = []

    def compare(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attended: torch.Tensor, scaling: float | None
    ) -> None:
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        errors.append((attended - exact).norm() / exact.norm())

    attention.watch = compare
    try:
        with torch.inference_mode():
            model.base_model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    finally:
        attention.watch = None
    found = torch.stack(errors)
    yield (
        f"FAVOR+ with {attention.record.features} features is off softmax attention by {found.mean():.0%} of its "
        f"length; by layer {found.min():.0%} to {found.max():.0%}"
    )
