"""The operator LocalGlobalAttention as tests need it: nodes, their inputs, and keys in view by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.local_global.reference import number_of_sides
from hdplugins.attention.operator import BodyVariant
from support.attention_layers import PADDINGS, BodyDescription, Cases, Layer, Wrong, alternating, filled, token_kinds

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
            **dict.fromkeys(("side_key", "side_value"), ("batch", "sides", self.heads, self.head_dim)),
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
        values = torch.eye(tokens + sides)[:, None].expand(1, -1, self.heads, -1)
        given = {
            "token_mask": torch.ones(1, tokens, dtype=torch.int32),
            "local_bias": torch.zeros(self.heads, 2 * self.radius + 1),
            "side_key": torch.zeros(1, sides, self.heads, 1),
            "side_value": values[:, tokens:],
            "side_bias": torch.zeros(self.heads, 2 * self.reach + 1),
        }
        nothing = torch.zeros(1, tokens, self.heads, 1)
        return int((self.by_definition([nothing, nothing, values[:, :tokens]], given) > 0).sum())


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
    state, side = ((batch, count, node.heads, node.head_dim) for count in (tokens, sides))
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


def _paddings(node: LocalGlobal) -> Cases:
    """Each node has half of the batches, and three nodes have several lengths."""
    lengths = (15, 131, 144) if node in (NODES[0], NODES[3], NODES[5]) else (131,)
    for number, (padding, tokens) in enumerate(itertools.product(PADDINGS, lengths), NODES.index(node)):
        batch = (1, 3)[number % 2]
        yield (padding, tokens, batch), inputs_of(node, token_kinds(padding, tokens, batch=batch))


def _unseen(node: LocalGlobal) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Padding, and sides behind the last whole one."""
    mask = token_kinds("right", 97)
    changed = filled(inputs_of(node, mask), {"key": mask == 0, "value": mask == 0})
    for name in changed.keys() & {"side_key", "side_value"}:
        changed[name][0, 49 // 16 :] = 50.0
        changed[name][1:, 97 // 16 :] = 50.0
    return inputs_of(node, mask), changed


def _wrong(node: LocalGlobal) -> Wrong:
    inputs = inputs_of(node, token_kinds("right", 211))
    changes = [{"token_mask": np.maximum(inputs["token_mask"], 1)}]
    if node.radius:  # of a single key without sides, all scores are alike
        changes.append({"local_bias": inputs["local_bias"][:, ::-1].copy()})
    if node.side:
        changes.append({"side_bias": inputs["side_bias"][:, ::-1].copy()})
        changes += [{name: np.roll(inputs[name], 1, axis=1)} for name in ("side_key", "side_value")]
    wrong: list[tuple[Layer, dict[str, np.ndarray], dict[str, Any]]] = [(node, inputs | each, {}) for each in changes]
    if node.radius:
        wrong.append((node, inputs, {"scale": 1.01 * node.head_dim**-0.5}))
    for other in wrong_nodes(node):
        own = inputs_of(other, inputs["token_mask"])
        table = np.pad(inputs["local_bias"], ((0, 0), (other.radius - node.radius,) * 2))
        own |= {name: array for name, array in inputs.items() if name in own and array.shape == own[name].shape}
        wrong.append((other, own | {"local_bias": table}, {}))
    return inputs, wrong


_SIDED = LocalGlobal(side=16, reach=128)

BODIES = BodyDescription(
    lengths=lambda node: alternating(inputs_of, node, node.lengths),
    paddings=_paddings,
    usual=lambda node: inputs_of(node, token_kinds("none", 211)),
    rounds_by_text=True,
    zero=lambda inputs, tokens: inputs["token_mask"] == 0,
    unseen=((NODES[0], NODES[3]), _unseen),
    large=None,
    # Measured 1.6e-6; a query of the second and third has what the layer before it rounded.
    chain=((_SIDED, NODES[0], _SIDED), lambda node: inputs_of(node, token_kinds("right", 131)), 2, 5e-6),
    wrong=_wrong,
    mistaken=(
        NODES[4],
        lambda node: inputs_of(node, token_kinds("holes", 211)),
        {
            BodyVariant.BATCHED: {
                "Sub 1": "more masked places follow the text than a span can reach",
                "Add 3": "0 is taken away in place of being added",
            },
            BodyVariant.BLOCKWISE: {
                "Min 0": "one block holds the whole text",
                "Min 1": "spans are wider, and the places that this adds are masked",
                "Add 3": "as in the batched variant, where the text is longer than the radius",
            },
        },
    ),
    counts=lambda node, variant: {
        "MatMul": 4 if node.side else 2,
        "Scan": 2 * (variant is BodyVariant.BLOCKWISE),
        "Transpose": 4 + 2 * bool(node.side) if variant is BodyVariant.BLOCKWISE else 5 + 3 * bool(node.side),
    },
    names={LocalGlobal(radius=127, side=16, reach=128): "LocalGlobalAttention_radius127_sides16"},
    distinct=[
        LocalGlobal(radius=radius, side=side, reach=128 * bool(side))
        for radius, side in itertools.product((0, 9, 127), (0, 4, 16))
    ],
    undefined=(
        _SIDED,
        lambda node: inputs_of(node, token_kinds("none", 33)),
        [
            ({"radius": -1}, "radius is -1; it must be 0 or more"),
            ({"radius": 8}, "local_bias has 19 distances; a radius of 8 has 17"),
            ({"side_tokens": 0}, "There are sides, and side_tokens is 0 and side_reach 128; both must be 1 or more"),
            ({"side_reach": 0}, "There are sides, and side_tokens is 16 and side_reach 0"),
            ({"side_reach": 127}, "side_bias has 257 distances; a reach of 127 has 255"),
            ({"side_tokens": 17}, "There are 3 side keys and 3 values; 33 tokens have 2 blocks of 17"),
            ({"side_key": None}, "There are no sides, but side_tokens is 16 and side_reach 128; both must be 0"),
        ],
    ),
    bodiless=[
        (replace(NODES[0], radius=-1), "radius is -1"),
        (replace(NODES[0], side=4), "side_reach 0; both must be 1 or more"),
    ],
)
