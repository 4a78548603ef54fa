"""States in float32 between layers in half precision: of models whose states go beyond float16's 65504."""

from __future__ import annotations

import torch

_SHRUNK = 2.0**-6
"""Factor of float16 weights whose products become states, which float32 undoes.

Models of this kind were trained in bfloat16, and their states go beyond 65504; the library keeps the second layer of
T5's feed-forward networks in float32 for that. A power of two changes no weight but those below 2^-8, and these by no
more than 2^-19, which is 1/2000, float16's own precision, of a usual weight of 2^-8 or more.
"""


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
