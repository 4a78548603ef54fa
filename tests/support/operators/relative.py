"""The operator RelativeAttention as tests need it: nodes, their inputs, and keys in view by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.operator import BodyVariant
from support.attention_layers import PADDINGS, BodyDescription, Cases, Layer, Wrong, filled, token_kinds

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
            **dict.fromkeys(("key", "value"), ("batch", "keys", self.heads, self.head_dim)),
            "key_kind": ("batch", "keys"),
            "positions": (self.heads, "distances", self.head_dim),
            **dict.fromkeys(("content_bias", "position_bias"), (self.heads, self.head_dim)),
            "segment_scores": ("batch", "tokens", self.heads),
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
        "query": (batch, tokens, node.heads, node.head_dim),
        "key": (batch, keys, node.heads, node.head_dim),
        "value": (batch, keys, node.heads, node.head_dim),
        "positions": (node.heads, node.distances(tokens, keys) + spare, node.head_dim),
        "content_bias": (node.heads, node.head_dim),
        "position_bias": (node.heads, node.head_dim),
        "segment_scores": (batch, tokens, node.heads),
    }
    sizes = {"query": 1.5, "key": 1.5, "value": 1.5, "segment_scores": 5.0}
    drawn = {name: generator.normal(size=shape) * sizes.get(name, 1.0) for name, shape in shapes.items()}
    names = [*node.operator.state_names, *node.inputs]
    return {name: kinds if name == "key_kind" else drawn[name].astype(node.dtype) for name in names}


_BLOCK = 128


def _lengths(node: Relative) -> Cases:
    """Memories and positions that are too many alternate as well."""
    paddings, batches, place = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3)), NODES.index(node)
    for number, tokens in enumerate((1, 5, _BLOCK - 1, _BLOCK, _BLOCK + 1, 211, 2 * _BLOCK, 2 * _BLOCK + 1)):
        for memory in (MEMORIES[(number + place) % 4], MEMORIES[(number + place + 2) % 4]):
            padding, batch = next(paddings), next(batches)
            kinds = key_kinds(padding, tokens, memory, batch=batch)
            yield (tokens, memory, padding, batch), inputs_of(node, kinds, tokens, spare=number % 4)


def _paddings(node: Relative) -> Cases:
    """Each node has half of the batches."""
    for number, (padding, memory) in enumerate(itertools.product(PADDINGS, (0, 7)), NODES.index(node)):
        batch = (1, 3)[(number + number // 2) % 2]
        yield (padding, memory, batch), inputs_of(node, key_kinds(padding, 131, memory, batch=batch), 131)


def _unseen(node: Relative) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Padding of the text and the part of the memory that is not there yet."""
    kinds = key_kinds("holes", 97, 40)
    return inputs_of(node, kinds, 97), filled(inputs_of(node, kinds, 97), {"key": kinds == 0, "value": kinds == 0})


def _large(node: Relative) -> dict[str, np.ndarray]:
    inputs = inputs_of(node, key_kinds("right", 40, 9), 40)
    for name in ("query", "key", "positions"):
        inputs[name][:] = 60.0
    return inputs


def _wrong(node: Relative) -> Wrong:
    inputs = inputs_of(node, key_kinds("right", 211, 7), 211, spare=211)
    changes = (
        {"positions": np.roll(inputs["positions"], 1, axis=1)},
        {"content_bias": inputs["position_bias"]},
        {"key_kind": np.maximum(inputs["key_kind"], 1)},
    )
    return inputs, [
        *((other, inputs, {}) for other in wrong_nodes(node)),
        *((node, inputs | change, {}) for change in changes),
        (node, inputs, {"scale": 1.01 * node.head_dim**-0.5}),
    ]


BODIES = BodyDescription(
    lengths=_lengths,
    paddings=_paddings,
    usual=lambda node: inputs_of(node, key_kinds("none", 211, 7), 211),
    zero=lambda inputs, tokens: inputs["key_kind"][:, -tokens:] == 0,
    unseen=((NODES[0], NODES[3]), _unseen),
    # All scores of a query are equal: what is left is the rounding of weights and values. Measured 2.4e-4.
    large=(Relative(head_dim=64, dtype="float16", segments=False), _large, 5e-4),
    # Measured 6.6e-6; values reach 4.
    chain=(
        (NODES[0], replace(NODES[0], reach=9), NODES[0]),
        lambda node: inputs_of(node, key_kinds("right", 131, 7), 131),
        2,
        1.3e-5,
    ),
    wrong=_wrong,
    mistaken=(
        NODES[3],
        lambda node: inputs_of(node, key_kinds("right", 301, 7), 301),
        {
            BodyVariant.BATCHED: {
                "Sub 0": "the number of blocks is rounded up further: a block of padding is dropped",
                "Sub 4": "more rows than needed follow the positions",
            },
            BodyVariant.BLOCKWISE: {
                "Min 0": "one block holds the whole text",
                "Sub 0": "as in the batched variant",
                "Sub 4": "likewise",
            },
        },
    ),
    counts=lambda node, variant: {
        "MatMul": 3,
        "Scan": 1 + (variant is BodyVariant.BLOCKWISE),
        "Transpose": 2 + node.segments if variant is BodyVariant.BLOCKWISE else 9 + 2 * node.segments,
    },
    names={Relative(causal=1, reach=9): "RelativeAttention_causal_reach9_segments"},
    distinct=[
        Relative(causal=causal, reach=reach, segments=segments)
        for causal, reach, segments in itertools.product((0, 1), (0, 1, 9), (False, True))
    ],
    undefined=(
        NODES[0],
        lambda node: inputs_of(node, key_kinds("none", 9, 3), 9),
        [
            ({"causal": 2}, "causal is 2; it must be 0 or 1"),
            ({"reach": -1}, "reach is -1; it must be 0 or more"),
            ({"key": torch.zeros(3, 4, 2, 32)}, "There are 4 keys for 9 tokens"),
            ({"positions": torch.zeros(2, 19, 32)}, "positions has 19 distances; 20 are needed"),
        ],
    ),
    bodiless=[(replace(NODES[0], causal=2), "causal is 2"), (replace(NODES[0], reach=-1), "reach is -1")],
)

PLUGIN_NODE = Relative(reach=40, dtype="float16")
