"""The precision of a graph: its types, and the parts that stay in float32 with any types."""

from __future__ import annotations

__all__ = ["WeightType", "cast_model"]

from enum import Enum

import torch

from hdexport.model.norms import float32_norm
from hdruntime.errors import ExportError


class WeightType(str, Enum):
    """Type of a graph's weights and activations."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type in PyTorch."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype

    @property
    def bytes_per_value(self) -> int:
        """Size of one number."""
        return 4 if self is WeightType.FLOAT32 else 2


def cast_model(model: torch.nn.Module, precision: WeightType) -> None:
    """Cast a model's weights in place; normalisations and buffers stay in float32.

    Buffers hold computed numbers, not learned ones: a rotary frequency that is rounded to float16 turns the token at
    position 4096 by a radian too much or too little.

    Args:
        model: a model in float32.
        precision: the type to cast to.

    Raises:
        ExportError: a weight is outside the type's range; the message names it.
    """
    if precision is WeightType.FLOAT32:
        return
    _check_range(model, precision)
    islands = [
        (parent, name, island)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (island := float32_norm(child)) is not None
    ]
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    model.to(precision.torch_dtype)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    for parent, name, island in islands:
        setattr(parent, name, island)


def _check_range(model: torch.nn.Module, precision: WeightType) -> None:
    """Refuse weights that would become infinite."""
    largest = torch.finfo(precision.torch_dtype).max
    outside = [
        f"{name} (largest magnitude {weight.detach().abs().max().item():.6g})"
        for name, weight in model.named_parameters()
        if weight.numel() and not weight.detach().abs().max().item() <= largest
    ]
    if outside:
        advice = "The checkpoint holds infinite or NaN weights."
        if precision is WeightType.FLOAT16:
            advice = "Build with --bf16, which has the range of float32."
        raise ExportError(
            f"{len(outside)} weights do not fit {precision.value} (at most {largest:.6g}): "
            f"{', '.join(outside[:5])}.\n{advice}"
        )
