"""The precision of a graph: its types, and the parts that stay in float32 with any types."""

from __future__ import annotations

import torch

from hdexport.model.norms import float32_norm
from hdruntime.bundle.manifest import Dtype
from hdruntime.errors import ExportError


def cast_model(model: torch.nn.Module, precision: Dtype) -> None:
    """Cast the weights of a model in float32, in place; normalisations and buffers stay in float32.

    Buffers hold computed numbers, not learned ones: a rotary frequency that is rounded to float16 turns the token at
    position 4096 by a radian too much or too little. An ExportError names a weight that is outside the type's range.
    """
    if precision == "float32":
        return
    dtype: torch.dtype = getattr(torch, precision)
    _check_range(model, precision, largest=torch.finfo(dtype).max)
    islands = [
        (parent, name, island)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (island := float32_norm(child)) is not None
    ]
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    model.to(dtype)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    for parent, name, island in islands:
        setattr(parent, name, island)


def _check_range(model: torch.nn.Module, precision: Dtype, *, largest: float) -> None:
    """Refuse weights that would become infinite."""
    outside = [
        f"{name} (largest magnitude {weight.detach().abs().max().item():.6g})"
        for name, weight in model.named_parameters()
        if weight.numel() and not weight.detach().abs().max().item() <= largest
    ]
    if outside:
        advice = "The checkpoint holds infinite or NaN weights."
        if precision == "float16":
            advice = "Build with --bf16, which has the range of float32."
        raise ExportError(
            f"{len(outside)} weights do not fit {precision} (at most {largest:.6g}): "
            f"{', '.join(outside[:5])}.\n{advice}"
        )
