"""Mixtures of experts: each expert computes the tokens that were routed to it, however many they are."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_IMPLEMENTATION = "hdexport"
"""Name of hdexport's implementation in transformers' experts interface."""

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights in transformers' experts interface, [experts, rows, columns] each."""


def experts_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Name -> module of transformers' experts interface, whose weights are those of all experts of a layer."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def use_chosen_experts(model: PreTrainedModel) -> None:
    """Make a model's experts traceable for any number of tokens, in place; nothing changes without experts.

    transformers' code loops over the experts that some token chose, sorts tokens by expert, or gathers a copy of an
    expert's weights for each token. Here the loop is over all experts, so that a graph has it, and an expert without
    tokens multiplies an empty matrix. Each expert's weight becomes a parameter, a view of the layer's: in the graph it
    is a matrix like those of other linear layers, stored in half precision and quantized as they are. Only experts of
    transformers' experts interface are reached.
    """
    for module in experts_of(model).values():
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _experts)
        module.config._experts_implementation = _IMPLEMENTATION  # type: ignore[union-attr]
        for name in _WEIGHTS:
            weight = module._parameters.pop(name, None)
            if weight is not None:
                views = (torch.nn.Parameter(view, requires_grad=False) for view in weight.detach().unbind())
                setattr(module, name, torch.nn.ParameterList(views))


def _experts(module: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, [tokens, hidden_size], as states are.

    chosen: [tokens, chosen], int64, the numbers of a token's experts, each once.
    weights: [tokens, chosen].
    """
    total = torch.zeros_like(states)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for expert in range(module.num_experts):
        rows, places = torch.where(chosen == expert)
        hidden = _linear(module, first, expert, states[rows])
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        hidden = _linear(module, "down_proj", expert, hidden)
        if module.has_post_expert_norm:
            hidden = module.post_expert_norm(hidden)
        added = total[rows] + hidden * weights[rows, places].unsqueeze(-1)
        # No row is there twice, so that no backend has to add while it writes.
        total = total.index_put((rows,), added.to(total.dtype))
    return total


def _linear(module: Any, name: str, expert: int, states: torch.Tensor) -> torch.Tensor:
    """An expert's projection of states, [rows, width]."""
    weight = getattr(module, name)[expert]
    result = states @ (weight if module.is_transposed else weight.T)
    return result + getattr(module, f"{name}_bias")[expert] if module.has_bias else result
