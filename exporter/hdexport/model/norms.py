"""Normalisations that compute in float32 beside neighbours of any type."""

from __future__ import annotations

from typing import Any

import torch

_WEIGHTS_AROUND_ZERO = ("Gemma3RMSNorm",)
"""The library's normalisations by the root mean square whose factor is the weight plus 1."""

_WEIGHTS_IF_ANY = ("EmbeddingGemma2RMSNorm", "NeoMMERMSNorm")
"""Normalisations whose weight, if there is one, is the factor; without a weight, they compute in float32 themselves."""


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
    Runtime makes one operator of a root and a quotient, and none of the library's reciprocal root. `weight`, [width],
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

    Normalisations by the root mean square are known by what all of the library's have, and nothing else has: a weight
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
    """Replace the library's normalisations by the root mean square within a module, in place, as casting does."""
    for parent in tuple(module.modules()):
        for name, child in tuple(parent.named_children()):
            norm = None if isinstance(child, RootMeanSquareNorm) else float32_norm(child)
            if isinstance(norm, RootMeanSquareNorm):
                setattr(parent, name, norm)
