"""The operator FavorAttention as tests need it: nodes, states, and the definition by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hdplugins import OPERATORS
from hdplugins.attention.favor.reference import draw_projection
from support.attention_layers import Layer


@dataclass(frozen=True, kw_only=True)
class Favor(Layer):
    """A node FavorAttention."""

    operator = OPERATORS["FavorAttention"]
    features: int = 40
    epsilon: float = 1e-4
    compat: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return {"features": self.features, "epsilon": self.epsilon, "compat": self.compat}

    @property
    def constants(self) -> dict[str, np.ndarray]:
        projection = draw_projection(3, features=self.features, head_dim=self.head_dim).numpy()
        return {"projection_" + "x".join(map(str, projection.shape)): projection}

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Features that the definition computes."""
        nothing = torch.zeros(1, tokens, self.heads, self.head_dim)
        with _Exponentials() as seen:
            self.by_definition([nothing] * 3, {"key_mask": torch.ones(1, tokens, dtype=torch.bool)}, **changes)
        return seen.count


class _Exponentials(TorchFunctionMode):
    """Counts the exponentials that are computed."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "exp":
            self.count += result.numel()
        return result


NODES = (
    Favor(),
    Favor(compat=1),
    Favor(dtype="float16", heads=3, features=7),
    Favor(head_dim=64, features=96, epsilon=1e-6),
    Favor(dtype="float16", compat=1, head_dim=80, features=100),
    Favor(features=1, heads=1, head_dim=8),
)


def wrong_nodes(node: Favor) -> list[Favor]:
    """Nodes that must not pass for it."""
    return [replace(node, compat=1 - node.compat), replace(node, epsilon=100 * node.epsilon)]


def inputs_of(node: Favor, mask: np.ndarray, *, size: float = 0.5) -> dict[str, np.ndarray]:
    """States, [batch, tokens, heads, head_dim], and the mask, [batch, tokens], by name; half precision is float16.

    Args:
        node: of them.
        mask: [batch, tokens], nonzero for real tokens.
        size: of queries and keys. With far larger ones nearly all features are epsilon, and all weights alike.
    """
    (batch, tokens), generator = mask.shape, np.random.default_rng(mask.shape[1])
    shape = batch, tokens, node.heads, node.head_dim
    sizes = {"query": size, "key": size, "value": 1.5}
    states = {name: (size * generator.normal(size=shape)).astype(node.dtype) for name, size in sizes.items()}
    return {**states, "key_mask": mask != 0}


def by_hand(node: Favor, inputs: Mapping[str, np.ndarray], *, text: int, head: int) -> np.ndarray:
    """[tokens, head_dim], one query and one key after the other, without a number that is subtracted and divided out.

    Only `epsilon` tells how large the exponentials were made: each is divided by the largest product's exponential.
    """
    (projection,) = (table.astype(np.float64) for table in node.constants.values())
    query, key, value = (inputs[name][text, :, head].astype(np.float64) for name in node.operator.state_names)
    mask = inputs["key_mask"][text]
    keys = [j for j in range(len(mask)) if mask[j] or node.compat]
    factor = node.head_dim**-0.25

    def products(vector: np.ndarray) -> np.ndarray:
        return factor * projection @ vector

    highest = max((products(key[j]).max() for j in keys), default=0.0)

    def features(vector: np.ndarray, most: float) -> np.ndarray:
        exponential = np.exp(products(vector)) / np.exp(factor**2 * (vector**2).sum() / 2)
        return exponential / np.exp(most) + node.epsilon

    attended = np.zeros_like(value)
    for i in range(len(mask) if keys else 0):
        of_query = features(query[i], products(query[i]).max())
        weights = {j: of_query @ features(key[j], highest) for j in keys}
        attended[i] = sum(weight * value[j] * mask[j] for j, weight in weights.items()) / sum(weights.values())
    return attended
