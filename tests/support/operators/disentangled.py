"""The operator DisentangledAttention as tests need it: nodes, their inputs, and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from support.attention_layers import Layer


@dataclass(frozen=True, kw_only=True)
class Disentangled(Layer):
    """A node DisentangledAttention.

    Attributes:
        reach: of the node.
        number_rows: of the tables: distances share rows.
    """

    operator = OPERATORS["DisentangledAttention"]
    reach: int = 9
    number_rows: int = 12

    @property
    def attributes(self) -> dict[str, Any]:
        return {"reach": self.reach}

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Rows in no order, so that a wrong distance has another row, which is not the opposite distance's."""
        rows = np.random.default_rng(self.reach).integers(0, self.number_rows, 2 * self.reach + 1)
        rows[[0, -1]] = 0, self.number_rows - 1
        return {f"rows_within_{self.reach}": rows.astype(np.int64)}

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("key_mask", "position_keys", "position_queries", *self.constants)

    @property
    def axes(self) -> dict[str, Sequence[str | int]]:
        table = (self.heads, self.number_rows, self.head_dim)
        return {**super().axes, **dict.fromkeys(("position_keys", "position_queries"), table)}

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Keys in view, as for every operator."""
        table = torch.zeros(self.heads, self.number_rows, 1)
        feeds = {
            "key_mask": torch.ones(1, tokens, dtype=torch.bool),
            **dict.fromkeys(("position_keys", "position_queries"), table),
        }
        nothing, values = torch.zeros(1, self.heads, tokens, 1), torch.eye(tokens).expand(1, self.heads, -1, -1)
        return int((self.by_definition([nothing, nothing, values], feeds, **changes) > 0).sum())


NODES = (
    Disentangled(),
    Disentangled(reach=130, number_rows=40, heads=3, dtype="float16"),
    Disentangled(reach=1, number_rows=3, head_dim=80),
    Disentangled(reach=64, number_rows=129, head_dim=64, heads=1),
)


def wrong_inputs(node: Disentangled, inputs: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Inputs by which the node must not give the answer that it gives by these."""
    keys, queries = inputs["position_keys"], inputs["position_queries"]
    wrong: list[dict[str, np.ndarray]] = [
        {"position_keys": queries, "position_queries": keys},
        {"position_keys": np.zeros_like(keys)},
        {"position_queries": np.zeros_like(queries)},
        {"position_keys": keys[:, ::-1].copy()},
        {"position_queries": queries[:, ::-1].copy()},
        {"position_keys": np.roll(keys, 1, axis=1)},
        {"key_mask": np.ones_like(inputs["key_mask"])},
    ]
    if node.heads > 1:
        wrong += [{name: np.roll(inputs[name], 1, axis=0)} for name in ("position_keys", "position_queries")]
    return [dict(inputs) | change for change in wrong]


def inputs_of(node: Disentangled, kinds: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a node by name, such that the softmax is far from uniform; bfloat16 is float16.

    Args:
        node: of them.
        kinds: [batch, tokens], 0 for padding.
    """
    (batch, tokens), generator = kinds.shape, np.random.default_rng(kinds.shape[1])
    state, table = (batch, node.heads, tokens, node.head_dim), (node.heads, node.number_rows, node.head_dim)
    shapes = dict.fromkeys(node.operator.state_names, state)
    shapes |= dict.fromkeys(("position_keys", "position_queries"), table)
    dtype = "float16" if node.dtype == "bfloat16" else node.dtype
    drawn = {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return drawn | {"key_mask": kinds != 0}
