"""Weights in half precision, and what stays in float32 beside them: normalisations, buffers, and states between layers
of models whose states go beyond float16's 65504."""

from __future__ import annotations

import torch

from hdexport.model.norms import float32_norm
from hdruntime.bundle.manifest import Dtype
from hdruntime.errors import ExportError

_SHRUNK = 2.0**-6
"""Factor of float16 weights whose products become states, which float32 undoes.

Models of this kind were trained in bfloat16, and their states go beyond 65504; the library keeps the second layer of
T5's feed-forward networks in float32 for that. A power of two changes no weight but those below 2^-8, and these by no
more than 2^-19, which is 1/2000, float16's own precision, of a usual weight of 2^-8 or more.
"""


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


class IntoStates(torch.nn.Module):
    """A linear layer whose results are states in float32, or become states by a normalisation; it changes
    the weights.
    """

    def __init__(self, original: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias
        self.factor = 1.0
        if self.weight.dtype is torch.float16:
            self.factor = 1 / _SHRUNK
            with torch.no_grad():
                self.weight.mul_(_SHRUNK)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden_size], float32."""
        states = torch.nn.functional.linear(values, self.weight).float()
        states = states if self.factor == 1 else states * self.factor
        return states if self.bias is None else states + self.bias.float()


class FromStates(torch.nn.Module):
    """Values that are made of states in float32, in the type of the weights that read them."""

    def __init__(self, original: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.original, self.dtype = original, dtype

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width]."""
        made: torch.Tensor = self.original(states)
        return made.to(self.dtype)


class InFloat32(torch.nn.Module):
    """A linear layer without a bias that computes in float32, of states that were not normalised."""

    def __init__(self, original: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = original.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width], float32."""
        return torch.nn.functional.linear(states.float(), self.weight.float())
