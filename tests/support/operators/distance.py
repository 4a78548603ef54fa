"""The operator ClippedDistanceAttention as tests need it: nodes, their inputs, and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.operator import BodyVariant
from support.attention_layers import (
    PADDINGS,
    BodyDescription,
    Cases,
    Layer,
    alternating,
    by_inputs,
    filled_padding,
    token_kinds,
    without_a_key,
)


@dataclass(frozen=True, kw_only=True)
class Clipped(Layer):
    """A node ClippedDistanceAttention.

    Attributes:
        reach: of the node.
        by_query: whether each text and each query has numbers of its own; else all share them.
        values: whether there are values by distance.
    """

    operator = OPERATORS["ClippedDistanceAttention"]
    reach: int = 7
    by_query: bool = False
    values: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        return {"reach": self.reach}

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("key_mask", "scores_by_distance", *["values_by_distance"] * self.values)

    def numbers_shape(self, batch: int, tokens: int) -> tuple[int, int, int, int]:
        """Shape of `scores_by_distance`."""
        texts, queries = (batch, tokens) if self.by_query else (1, 1)
        return (texts, queries, self.heads, 2 * self.reach + 1)

    @property
    def axes(self) -> dict[str, Sequence[str | int]]:
        distances = 2 * self.reach + 1
        queries: list[str | int] = ["batch", "tokens", self.heads] if self.by_query else [1, 1, self.heads]
        return {
            **super().axes,
            "scores_by_distance": [*queries, distances],
            "values_by_distance": [distances, self.head_dim],
        }

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Keys in view, as for every operator."""
        feeds = {
            "scores_by_distance": torch.zeros(self.numbers_shape(1, tokens)),
            "values_by_distance": torch.zeros(2 * self.reach + 1, tokens),
            "key_mask": torch.ones(1, tokens, dtype=torch.bool),
        }
        nothing = torch.zeros(1, tokens, self.heads, 1)
        values = torch.eye(tokens)[:, None].expand(1, tokens, self.heads, tokens)
        return int((self.by_definition([nothing, nothing, values], feeds, **changes) > 0).sum())


@dataclass(frozen=True, kw_only=True)
class Shared(Clipped):
    """A node that has its tables as initializers, as T5's and MPNet's nodes have."""

    @property
    def constants(self) -> dict[str, np.ndarray]:
        shapes: dict[str, tuple[int, ...]] = {"scores": self.numbers_shape(1, 1)}
        if self.values:
            shapes["values"] = (2 * self.reach + 1, self.head_dim)
        generator = np.random.default_rng(self.reach)
        return {
            f"{name}_within_{self.reach}": (1.5 * generator.normal(size=shape)).astype(np.float32)
            for name, shape in shapes.items()
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("key_mask", *self.constants)

    def by_definition(
        self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor], **changes: Any
    ) -> torch.Tensor:
        names = ("scores_by_distance", "values_by_distance")
        tables = (torch.from_numpy(table).to(states[0].dtype) for table in self.constants.values())
        return super().by_definition(states, feeds, **dict(zip(names, tables, strict=False)), **changes)


NODES = (
    Clipped(),
    Clipped(by_query=True, values=True, reach=9),
    Clipped(by_query=True, reach=130, heads=3, dtype="float16"),
    Clipped(values=True, reach=1, head_dim=80),
    Clipped(reach=128, head_dim=64, dtype="float16"),
    Clipped(by_query=True, values=True, reach=64, heads=1, dtype="float16"),
)


def wrong_inputs(node: Clipped, inputs: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Inputs by which the node must not give the answer that it gives by these."""
    numbers, mask = inputs["scores_by_distance"], inputs["key_mask"]
    wrong: list[dict[str, np.ndarray]] = [
        {"scores_by_distance": np.roll(numbers, 1, axis=3)},
        {"scores_by_distance": numbers[..., ::-1].copy()},
        {"scores_by_distance": _changed(numbers, (..., 0))},
        {"scores_by_distance": _changed(numbers, (..., -1))},
        {"scores_by_distance": _changed(numbers, (..., node.reach))},
        {"key_mask": np.ones_like(mask)},
    ]
    if node.by_query:
        wrong += [{"scores_by_distance": np.roll(numbers, 1, axis=axis)} for axis in (0, 1)]
    if node.values:
        rows = inputs["values_by_distance"]
        wrong += [
            {"values_by_distance": np.roll(rows, 1, axis=0)},
            {"values_by_distance": np.zeros_like(rows)},
            {"values_by_distance": _changed(rows, (0,))},
            {"values_by_distance": _changed(rows, (-1,))},
        ]
    return [dict(inputs) | change for change in wrong]


def inputs_of(node: Clipped, kinds: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a node by name, such that the softmax is far from uniform; bfloat16 is float16.

    Args:
        node: of them.
        kinds: [batch, tokens], 0 for padding.
    """
    (batch, tokens), generator = kinds.shape, np.random.default_rng(kinds.shape[1])
    state = (batch, tokens, node.heads, node.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(node.operator.state_names, state),
        "scores_by_distance": node.numbers_shape(batch, tokens),
        "values_by_distance": (2 * node.reach + 1, node.head_dim),
    }
    dtype = "float16" if node.dtype == "bfloat16" else node.dtype
    names = [*node.operator.state_names, *node.inputs]
    drawn = {name: (1.5 * generator.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}
    return {name: kinds != 0 if name == "key_mask" else drawn[name] for name in names}


def _changed(array: np.ndarray, where: tuple[Any, ...]) -> np.ndarray:
    changed = array.copy()
    changed[where] += 1
    return changed


_BLOCK = 128
_FAR = Clipped(by_query=True, values=True, reach=9)


def _lengths(node: Clipped) -> Cases:
    """Around the lengths from which distances are clipped, those of a band, and blocks: every second one for a node."""
    edges = {node.reach + 1, 2 * node.reach + 1, node.reach + _BLOCK, 2 * node.reach + _BLOCK}
    around = {edge + shift for edge in edges for shift in (-1, 0, 1)}
    blocks = (1, 2, 5, _BLOCK - 1, _BLOCK, _BLOCK + 1, 211, 2 * _BLOCK, 2 * _BLOCK + 1, 3 * _BLOCK + 7)
    lengths = sorted({*blocks[NODES.index(node) % 2 :: 2], *around} - {0})
    return alternating(inputs_of, node, lengths)


def _paddings(node: Clipped) -> Cases:
    """Each node has half of the pairs."""
    for number, padding in enumerate(PADDINGS, NODES.index(node)):
        batch = (1, 3)[number % 2]
        yield (padding, batch), inputs_of(node, token_kinds(padding, 131, batch=batch))


BODIES = BodyDescription(
    lengths=_lengths,
    paddings=_paddings,
    usual=lambda node: inputs_of(node, token_kinds("none", 211)),
    zero=lambda inputs, tokens: np.repeat(~inputs["key_mask"].any(axis=1, keepdims=True), tokens, axis=1),
    unseen=((NODES[0], _FAR), lambda node: filled_padding(inputs_of, node)),
    large=(
        # Measured 4.7e-4, the rounding of weights and values.
        Clipped(head_dim=64, dtype="float16"),
        lambda node: (
            inputs_of(node, token_kinds("right", 140))
            | dict.fromkeys(("query", "key"), np.full((3, 140, node.heads, 64), 60, np.float16))
        ),
        1e-3,
    ),
    # Measured 3.1e-6; values reach 6.1.
    chain=(
        (_FAR, replace(_FAR, values=False), _FAR),
        lambda node: inputs_of(node, token_kinds("right", 131)),
        2,
        6e-6,
    ),
    wrong=lambda node: by_inputs(node, inputs_of(node, token_kinds("right", 301)), wrong_inputs),
    mistaken=(
        _FAR,
        lambda node: without_a_key(inputs_of(node, token_kinds("right", 301))),
        {
            BodyVariant.BATCHED: {"Sub 0": "the number of blocks is rounded up further: a block of padding is dropped"},
            BodyVariant.BLOCKWISE: {
                "Min 0": "one block holds the whole text",
                "Sub 0": "as in the batched variant",
                "Sub 5": "only scores that all queries share would show it",
                "Sub 6": "only scores that all sequences share would show it",
                "Sub 8": "the last block gets more rows of scores than it has queries",
            },
        },
    ),
    counts=lambda node, variant: {
        "GatherElements": 0,
        "MatMul": 2 + node.values,
        "Scan": 1 + (variant is BodyVariant.BLOCKWISE),
        "Transpose": 4 if variant is BodyVariant.BLOCKWISE else 7,
    },
    # Bodies read the reach from the node.
    names={
        Clipped(reach=reach, values=values): "ClippedDistanceAttention" + "_values" * values
        for reach in (1, 9)
        for values in (False, True)
    },
    undefined=(
        _FAR,
        lambda node: inputs_of(node, token_kinds("none", 11)),
        [
            ({"reach": 0}, "reach is 0; it must be 1 or more"),
            ({"reach": 8}, "scores_by_distance has 19 distances; a reach of 8 has 17"),
            ({"values_by_distance": torch.zeros(17, 32)}, "values_by_distance has 17 distances; a reach of 9 has 19"),
        ],
    ),
    bodiless=[(replace(_FAR, reach=0), "reach is 0; it must be 1 or more")],
)

PLUGIN_NODE = Clipped(by_query=True, values=True, reach=20, dtype="float16")
