"""Weights in half precision, and what stays in float32 beside them: normalisations, buffers, and states between layers
of models whose states go beyond float16's 65504."""

from __future__ import annotations

from typing import Any

import torch

from hdruntime.bundle.manifest import Dtype
from hdruntime.errors import ExportError, Message, Setting

_WEIGHTS_AROUND_ZERO = ("Gemma3RMSNorm",)
"""RMSNorm classes of transformers whose factor is the weight plus 1."""

_WEIGHTS_IF_ANY = ("EmbeddingGemma2RMSNorm", "NeoMMERMSNorm")
"""Normalisations whose weight, if there is one, is the factor; without a weight, they compute in float32 themselves."""

_SHRUNK = 2.0**-6
"""Factor of float16 weights whose products become states, which float32 undoes.

Models of this kind were trained in bfloat16, and their states go beyond 65504; transformers keeps the second layer of
T5's feed-forward networks in float32 for that. A power of two changes no weight but those below 2^-8, and these by no
more than 2^-19, which is 1/2000, float16's own precision, of a usual weight of 2^-8 or more.
"""


class _Float32LayerNorm(torch.nn.Module):
    """Layer normalisation that computes in float32 between half-precision neighbours."""

    def __init__(self, original: torch.nn.LayerNorm) -> None:
        super().__init__()
        self.shape, self.eps = original.normalized_shape, original.eps
        self.weight = torch.nn.Parameter(original.weight.detach().float())
        self.bias = None if original.bias is None else torch.nn.Parameter(original.bias.detach().float())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normalised = torch.nn.functional.layer_norm(hidden_states.float(), self.shape, self.weight, self.bias, self.eps)
        return normalised.to(hidden_states.dtype)


class RootMeanSquareNorm(torch.nn.Module):
    """States divided by the root of their mean square: no mean is subtracted, and no bias added.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4, with a root and a quotient. ONNX
    Runtime makes one operator of a root and a quotient, and none of transformers' reciprocal root. `weight`, [width],
    and `epsilon` are the original's, which may be one of these, unless given.
    """

    def __init__(self, original: Any, *, weight: torch.Tensor | None = None, epsilon: float | None = None) -> None:
        super().__init__()
        weight = original.weight if weight is None else weight
        self.weight = torch.nn.Parameter(weight.detach().float())
        self.variance_epsilon = float(original.variance_epsilon if epsilon is None else epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width], of any float dtype; the result has the same shape and dtype."""
        wide = hidden_states.float()
        root = torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide / root * self.weight).to(hidden_states.dtype)


def float32_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    """A module that takes the place of a normalisation; None for any other module.

    RMSNorm modules are recognised by what all of transformers' have, and nothing else has: a weight
    without a bias, and a ``variance_epsilon``. Normalisations that differ in that are known by name.
    """
    if isinstance(module, torch.nn.LayerNorm):
        return _Float32LayerNorm(module)
    weights = dict(module.named_parameters())
    name, epsilon = type(module).__name__, getattr(module, "eps", None)
    if name in _WEIGHTS_AROUND_ZERO:
        return RootMeanSquareNorm(module, weight=1 + weights["weight"].detach().float(), epsilon=epsilon)
    if name in _WEIGHTS_IF_ANY and weights:
        return RootMeanSquareNorm(module, epsilon=epsilon)
    if hasattr(module, "variance_epsilon") and list(weights) == ["weight"] and weights["weight"].dim() == 1:
        return RootMeanSquareNorm(module)
    return None


def use_root_mean_squares(module: torch.nn.Module) -> None:
    """Replace transformers' RMSNorm modules within a module, in place, as casting does."""
    for parent in tuple(module.modules()):
        for name, child in tuple(parent.named_children()):
            norm = None if isinstance(child, RootMeanSquareNorm) else float32_norm(child)
            if isinstance(norm, RootMeanSquareNorm):
                setattr(parent, name, norm)


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
    """Reject weights that would become infinite."""
    outside = [
        f"{name} (largest magnitude {weight.detach().abs().max().item():.6g})"
        for name, weight in model.named_parameters()
        if weight.numel() and not weight.detach().abs().max().item() <= largest
    ]
    if outside:
        hint: Message = "The checkpoint holds infinite or NaN weights."
        if precision == "float16":
            hint = (
                "Build with ",
                Setting("precision", "bfloat16", command="build"),
                ", which has the range of float32.",
            )
        raise ExportError(
            f"{len(outside)} weights do not fit {precision} (at most {largest:.6g}): {', '.join(outside[:5])}.",
            hint=hint,
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
