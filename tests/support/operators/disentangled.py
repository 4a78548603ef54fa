"""The operator DisentangledAttention as tests need it: nodes, their inputs, and wrong ones."""

from __future__ import annotations

import itertools
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
        nothing = torch.zeros(1, tokens, self.heads, 1)
        values = torch.eye(tokens)[:, None].expand(1, tokens, self.heads, tokens)
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
    state, table = (batch, tokens, node.heads, node.head_dim), (node.heads, node.number_rows, node.head_dim)
    shapes = dict.fromkeys(node.operator.state_names, state)
    shapes |= dict.fromkeys(("position_keys", "position_queries"), table)
    dtype = "float16" if node.dtype == "bfloat16" else node.dtype
    drawn = {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return drawn | {"key_mask": kinds != 0}


_BLOCK = 128


def _lengths(node: Disentangled) -> Cases:
    """Around each block, around the reach, and around the band of the keys within it."""
    edges = {node.reach, node.reach + _BLOCK, 2 * node.reach + _BLOCK}
    blocks = {1, 2, 5, _BLOCK - 1, _BLOCK, _BLOCK + 1, 211, 2 * _BLOCK + 1, 3 * _BLOCK + 7}
    lengths = sorted({*blocks, *(edge + shift for edge in edges for shift in (-1, 0, 1, 2))} - {0})
    return alternating(inputs_of, node, lengths)


def _paddings(node: Disentangled) -> Cases:
    """The first node has all pairs, others half of them."""
    pairs = list(itertools.product(PADDINGS, (1, 3)))
    for padding, batch in pairs if node == NODES[0] else pairs[1::2]:
        yield (padding, batch), inputs_of(node, token_kinds(padding, 131, batch=batch))


def _large(node: Disentangled) -> dict[str, np.ndarray]:
    inputs = inputs_of(node, token_kinds("right", 140))
    for name in ("query", "key", "position_keys", "position_queries"):
        inputs[name][:] = 60.0
    return inputs


BODIES = BodyDescription(
    lengths=_lengths,
    paddings=_paddings,
    usual=lambda node: inputs_of(node, token_kinds("none", 211)),
    zero=lambda inputs, tokens: np.repeat(~inputs["key_mask"].any(axis=1, keepdims=True), tokens, axis=1),
    unseen=(NODES[:1], lambda node: filled_padding(inputs_of, node)),
    large=(Disentangled(head_dim=64, dtype="float16"), _large, 1e-3),  # measured 4.7e-4, of weights and values
    chain=(
        (NODES[0], replace(NODES[0], reach=4), NODES[0]),
        lambda node: inputs_of(node, token_kinds("right", 131)),
        1,
        6e-6,
    ),
    wrong=lambda node: by_inputs(node, inputs_of(node, token_kinds("right", 301)), wrong_inputs),
    mistaken=(
        NODES[0],
        lambda node: without_a_key(inputs_of(node, token_kinds("right", 301))),
        {
            BodyVariant.BATCHED: {"Sub 0": "the number of blocks is rounded up further: a block of padding is dropped"},
            BodyVariant.BLOCKWISE: {
                "Min 0": "one block holds the whole text",
                "Sub 0": "as in the batched variant",
                "Min 1": "the band of a block reaches farther than it has to",
            },
        },
    ),
    counts=lambda node, variant: {
        "MatMul": 4,
        "GatherElements": 2,
        "Scan": 1 + (variant is BodyVariant.BLOCKWISE),
        "Transpose": 4 if variant is BodyVariant.BLOCKWISE else 8,
    },
    names=dict.fromkeys(NODES, "DisentangledAttention"),
    undefined=(
        NODES[0],
        lambda node: inputs_of(node, token_kinds("none", 11)),
        [
            ({"reach": 0}, "reach is 0; it must be 1 or more"),
            ({"reach": 8}, "row_of_distance has 19 distances; a reach of 8 has 17"),
            ({"position_keys": torch.zeros(2, 11, 32)}, r"\[2, 11, 32\] and \[2, 12, 32\]; both are \[heads, rows"),
        ],
    ),
    bodiless=[(replace(NODES[0], reach=0), "reach is 0; it must be 1 or more")],
)
