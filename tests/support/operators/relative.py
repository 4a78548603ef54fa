"""The operator RelativeAttention as tests need it: nodes, their inputs, and keys in view by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from support.attention_layers import Layer, token_kinds

MEMORIES = (0, 1, 7, 512)
"""Sizes of a memory, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Relative(Layer):
    """A node RelativeAttention."""

    operator = OPERATORS["RelativeAttention"]
    causal: int = 0
    reach: int = 0
    segments: bool = True

    @property
    def attributes(self) -> dict[str, Any]:
        return {"causal": self.causal, "reach": self.reach}

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("key_kind", "positions", "content_bias", "position_bias", *["segment_scores"] * self.segments)

    @property
    def axes(self) -> dict[str, Sequence[str | int]]:
        return {
            **super().axes,
            **dict.fromkeys(("key", "value"), ("batch", self.heads, "keys", self.head_dim)),
            "key_kind": ("batch", "keys"),
            "positions": (self.heads, "distances", self.head_dim),
            **dict.fromkeys(("content_bias", "position_bias"), (self.heads, self.head_dim)),
            "segment_scores": ("batch", self.heads, "tokens"),
        }

    def distances(self, tokens: int, keys: int) -> int:
        """The rows of the positions that are needed."""
        return keys if self.causal else keys + tokens - 1

    def keys_by_hand(self, kinds: np.ndarray, tokens: int, query: int) -> list[int]:
        """The keys that a query sees in one text; `kinds` is [keys]."""
        own = len(kinds) - tokens + query
        if kinds[own] == 0:
            return []
        return [
            key
            for key, kind in enumerate(kinds)
            if kind and (key <= own or not self.causal) and (own - key < self.reach or not self.reach)
        ]

    def looked_at(self, tokens: int, global_tokens: int = 0, *, memory: int = 0, **changes: torch.Tensor) -> int:
        """Keys in view, as for every operator; `memory` tokens are remembered."""
        kinds = np.ones(memory + tokens, np.int32)
        return self.heads * sum(len(self.keys_by_hand(kinds, tokens, query)) for query in range(tokens))


NODES = (
    Relative(),
    Relative(segments=False, heads=3, dtype="float16"),
    Relative(causal=1, segments=False),
    Relative(causal=1, reach=9, head_dim=64),
    Relative(reach=70, dtype="float16", heads=1),
    Relative(reach=1, segments=False, head_dim=80),
)


def wrong_nodes(node: Relative) -> list[Relative]:
    """Nodes that must not pass for it."""
    return [
        replace(node, causal=1 - node.causal),
        replace(node, reach=node.reach + 1),
        replace(node, reach=5),
        *([replace(node, segments=False)] if node.segments else []),
    ]


def key_kinds(padding: str, tokens: int, memory: int, *, batch: int = 3, segments: int = 3) -> np.ndarray:
    """[batch, memory + tokens], int32, 0 for padding, else the segment of the token, and 1.

    The first text has the padding, as in `token_kinds`. The second text remembers half of the memory, the third
    nothing.
    """
    real = token_kinds(padding, tokens, batch=batch)
    remembered = np.ones((batch, memory), np.int32)
    remembered[1:2, : memory // 2] = 0
    remembered[2:] = 0
    kinds = np.concatenate([remembered, real], axis=1)
    drawn = np.random.default_rng(kinds.shape[1]).integers(1, segments + 1, kinds.shape)
    return np.where(kinds == 0, 0, np.sort(drawn, axis=1)).astype(np.int32)


def inputs_of(node: Relative, kinds: np.ndarray, tokens: int, *, spare: int = 0) -> dict[str, np.ndarray]:
    """The inputs of a node by name, such that the softmax is far from uniform; half precision is float16.

    Args:
        node: of them.
        kinds: [batch, keys].
        tokens: of the text.
        spare: rows of the positions that are not needed.
    """
    (batch, keys), generator = kinds.shape, np.random.default_rng(kinds.shape[1] + tokens)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (batch, node.heads, tokens, node.head_dim),
        "key": (batch, node.heads, keys, node.head_dim),
        "value": (batch, node.heads, keys, node.head_dim),
        "positions": (node.heads, node.distances(tokens, keys) + spare, node.head_dim),
        "content_bias": (node.heads, node.head_dim),
        "position_bias": (node.heads, node.head_dim),
        "segment_scores": (batch, node.heads, tokens),
    }
    sizes = {"query": 1.5, "key": 1.5, "value": 1.5, "segment_scores": 5.0}
    drawn = {name: generator.normal(size=shape) * sizes.get(name, 1.0) for name, shape in shapes.items()}
    names = [*node.operator.state_names, *node.inputs]
    return {name: kinds if name == "key_kind" else drawn[name].astype(node.dtype) for name in names}
