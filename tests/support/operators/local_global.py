"""The operator LocalGlobalAttention as tests need it: nodes, their inputs, and keys in view by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.local_global.reference import number_of_sides
from support.attention_layers import Layer

_SIDES = ("side_key", "side_value", "side_bias")


@dataclass(frozen=True, kw_only=True)
class LocalGlobal(Layer):
    """A node LocalGlobalAttention; `side` is its number of tokens of a side, 0 for none."""

    operator = OPERATORS["LocalGlobalAttention"]
    radius: int = 9
    side: int = 0
    reach: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return {"radius": self.radius, "side_tokens": self.side, "side_reach": self.reach}

    @property
    def node_attributes(self) -> dict[str, Any]:
        """The scale is not 1, as LongT5's is, so that one that is left out shows."""
        return {**self.attributes, "scale": self.head_dim**-0.5}

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("token_mask", "local_bias", *(_SIDES if self.side else ()))

    @property
    def axes(self) -> dict[str, Sequence[str | int]]:
        return {
            **super().axes,
            "local_bias": (self.heads, 2 * self.radius + 1),
            **dict.fromkeys(("side_key", "side_value"), ("batch", self.heads, "sides", self.head_dim)),
            "side_bias": (self.heads, 2 * self.reach + 1),
        }

    @property
    def lengths(self) -> list[int]:
        """Around the windows, blocks of queries, and sides."""
        edges = {self.radius, 2 * self.radius + 1, 2 * (self.radius + 1), 64, 128, self.side, 3 * self.side}
        return sorted({1, 2, 5, 113, 211} | {edge + step for edge in edges for step in (-1, 0, 1) if edge + step > 0})

    def keys_by_hand(self, mask: np.ndarray, query: int) -> tuple[list[int], list[int], int]:
        """The tokens that a query sees in one text, [tokens], the sides, and the query's own side."""
        if not mask[query]:
            return [], [], 0
        near = [
            key for key in range(query - self.radius, query + self.radius + 1) if 0 <= key < len(mask) and mask[key]
        ]
        if not self.side:
            return near, [], 0
        whole = sum(bool(mask[end]) for end in range(self.side - 1, len(mask), self.side))
        return near, list(range(whole)), min(query // self.side, whole - 1)

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Weights above 0 of the definition where all scores are equal."""
        sides = number_of_sides(tokens, self.side) if self.side else 0
        values = torch.eye(tokens + sides).expand(1, self.heads, -1, -1)
        given = {
            "token_mask": torch.ones(1, tokens, dtype=torch.int32),
            "local_bias": torch.zeros(self.heads, 2 * self.radius + 1),
            "side_key": torch.zeros(1, self.heads, sides, 1),
            "side_value": values[:, :, tokens:],
            "side_bias": torch.zeros(self.heads, 2 * self.reach + 1),
        }
        nothing = torch.zeros(1, self.heads, tokens, 1)
        return int((self.by_definition([nothing, nothing, values[:, :, :tokens]], given) > 0).sum())


NODES = (
    LocalGlobal(),
    LocalGlobal(radius=127, heads=3, dtype="float16"),
    LocalGlobal(radius=0, head_dim=80),
    LocalGlobal(side=16, reach=128),
    LocalGlobal(side=4, reach=3, radius=70, head_dim=64),
    LocalGlobal(side=16, reach=2, dtype="float16", heads=1),
    LocalGlobal(side=1, reach=5, radius=0),
)


def wrong_nodes(node: LocalGlobal) -> list[LocalGlobal]:
    """Nodes that must not pass for it, with the tables of a radius and a reach that are larger."""
    return [
        replace(node, radius=node.radius + 1),
        *(
            [replace(node, side=node.side + 1), replace(node, reach=1), replace(node, side=0, reach=0)]
            if node.side
            else []
        ),
    ]


def inputs_of(node: LocalGlobal, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a node by name, such that the softmax is far from uniform; half precision is float16.

    Args:
        node: of them.
        mask: [batch, tokens].
    """
    (batch, tokens), generator = mask.shape, np.random.default_rng(mask.shape[1])
    sides = number_of_sides(tokens, node.side) if node.side else 0
    state, side = ((batch, node.heads, count, node.head_dim) for count in (tokens, sides))
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(node.operator.state_names, state),
        "local_bias": (node.heads, 2 * node.radius + 1),
        "side_key": side,
        "side_value": side,
        "side_bias": (node.heads, 2 * node.reach + 1),
    }
    drawn = {name: 1.5 * generator.normal(size=shape) for name, shape in shapes.items()}
    names = [*node.operator.state_names, *node.inputs]
    return {name: mask if name == "token_mask" else drawn[name].astype(node.dtype) for name in names}
