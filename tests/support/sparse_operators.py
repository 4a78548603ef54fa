"""The sparse operators as tests need them: nodes, their keys in view counted by hand, and what is particular to each.

A test of all sparse operators goes through `DESCRIPTIONS`; a new operator is one more `SparseLayer` and `Description`.
"""

from __future__ import annotations

__all__ = [
    "BLOCKS",
    "CHUNKS",
    "DESCRIPTIONS",
    "GLOBALS",
    "LSH",
    "PADDINGS",
    "WINDOWS",
    "Blocks",
    "Chunks",
    "Description",
    "Layer",
    "Lsh",
    "SparseLayer",
    "Window",
    "token_kinds",
]

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import onnx
import torch

from hdplugins import OPERATORS, Operator
from hdplugins.operators.lsh_attention.hashing import draw_rotations
from hdplugins.operators.onnx_text import BlockOrder

PADDINGS = ("none", "right", "left", "holes", "all")
GLOBALS = ("none", "first", "scattered", "all")


def token_kinds(padding: str, tokens: int, *, globals_: str = "none", bound: int = 0, batch: int = 3) -> np.ndarray:
    """[batch, tokens], int32; the first text has the padding, all have globals, differently many where scattered."""
    generator = np.random.default_rng(tokens)
    kinds = np.ones((batch, tokens), np.int32)
    if padding == "right":
        kinds[0, (tokens + 1) // 2 :] = 0
    elif padding == "left":
        kinds[0, : tokens // 2] = 0
    elif padding == "holes":
        kinds[0] = generator.random(tokens) < 0.6
    elif padding == "all":
        kinds[0] = 0
    for number, row in enumerate(kinds):
        (real,) = row.nonzero()
        if globals_ == "first":
            row[real[: min(1, bound)]] = 2
        elif globals_ == "scattered":
            row[generator.permutation(real)[: max(min(bound, len(real)) - number, 0)]] = 2
        elif globals_ == "all":
            row[real[:bound]] = 2
    return kinds


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """A node of an attention operator."""

    operator: ClassVar[Operator]
    bound: ClassVar[int] = 0
    """The most global tokens of a text."""
    heads: int = 2
    kv_heads: int | None = None
    """Of keys and values; None for as many as of queries."""
    head_dim: int = 32
    dtype: str = "float32"

    def heads_of(self, state: str) -> int:
        """Of a state of that name."""
        return self.heads if self.kv_heads is None or state not in ("key", "value") else self.kv_heads

    @property
    def is_grouped(self) -> bool:
        """Whether there are fewer heads of keys than of queries."""
        return self.kv_heads not in (None, self.heads)

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, `scale` aside."""
        return {}

    @property
    def node_attributes(self) -> dict[str, Any]:
        """Of the node."""
        return {**self.attributes, "scale": self.head_dim**-0.5}

    @functools.cached_property
    def name(self) -> str:
        """Operator type of the node in a portable graph."""
        return self.body().name

    def body(self, order: BlockOrder = BlockOrder.PARALLEL) -> onnx.FunctionProto:
        """What the portable graph holds for it."""
        face = self.operator.face("onnx_function")
        described: dict[str, Any] = {"grouped": self.is_grouped} if self.operator.groups_heads else {}
        return face.function_of_node(
            inputs=self.operator.states + len(self.inputs), attributes=self.node_attributes, order=order, **described
        )

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Inputs that are initializers, by name."""
        return {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """After the states."""
        return (self.operator.mask, *self.constants)

    def decided(self, states: torch.Tensor) -> torch.Tensor:
        """First states, [batch, heads, tokens, head_dim], by which rounding decides nothing: here any."""
        return states

    def by_definition(
        self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor], **changes: Any
    ) -> torch.Tensor:
        """[batch, heads, tokens, head_dim], of states of that shape; `changes` are attributes and inputs."""
        reference = self.operator.face("reference")
        (name,) = reference.__all__
        tensors = {**feeds, **{name: torch.from_numpy(table) for name, table in self.constants.items()}}
        given = [*states, *(tensors[name] for name in self.inputs)]
        arguments = dict(zip(self.operator.inputs, given, strict=False))
        arguments |= {**self.attributes, "scale": states[0].shape[-1] ** -0.5, **changes}
        return getattr(reference, name)(**arguments)

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Weights above 0 of the definition where all scores are equal: values are unit vectors, which show them."""
        *others, last = self.operator.state_names
        nothing = [torch.zeros(1, self.heads_of(name), tokens, 1) for name in others]
        values = torch.eye(tokens).expand(1, self.heads_of(last), tokens, tokens)
        kinds = torch.ones(1, tokens, dtype=torch.int32)
        kinds[:, :global_tokens] = 2
        feeds = {"key_mask": kinds >= 1, "token_kind": kinds, "token_mask": (kinds >= 1).int()}
        return int((self.by_definition([*nothing, values], feeds, **changes) > 0).sum())

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        defaults = [field.default for field in fields(self)]
        changed = [
            f"{name}={value}" for (name, value), default in zip(values, defaults, strict=True) if value != default
        ]
        return " ".join([type(self).__name__, *changed])


@dataclass(frozen=True, kw_only=True)
class SparseLayer(Layer):
    """A node of a sparse operator."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Texts around what the node counts in, 1 token, and primes."""

    @abstractmethod
    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        """The keys that a query sees in one text, each as often as it counts.

        Args:
            kinds: the text's mask, [tokens].
            vectors: the first states of the head, [tokens, head_dim].
            head: its number.
            query: number of the token.
        """

    def keys_of(self, states: Mapping[str, np.ndarray]) -> np.ndarray:
        """What queries, the first states, are multiplied with: [batch, heads, tokens, head_dim]."""
        return states["key"]

    def by_pytorch(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """PyTorch's answer in the states' dtype, whose error is what a kernel is measured by."""
        return self.by_definition(states, feeds)


@dataclass(frozen=True, kw_only=True)
class Window(SparseLayer):
    """A node SlidingWindowAttention."""

    operator = OPERATORS["SlidingWindowAttention"]
    left: int
    right: int
    dilation: tuple[int, ...] = (1,)
    bound: int = 0  # type: ignore[misc]

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "left": self.left,
            "right": self.right,
            "dilation": self.dilation,
            "global_bound": self.bound,
        }

    def by_pytorch(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of its fused attention with a dense mask."""
        heads, tokens, head_dim = states[0].shape[1:]
        steps = torch.tensor(self.dilation * (heads // len(self.dilation)))[:, None, None]
        offset = torch.arange(tokens) - torch.arange(tokens)[:, None]
        near = (offset >= -self.left * steps) & (offset <= self.right * steps) & (offset % steps == 0)
        kind = feeds["token_kind"][:, None, None]
        seen = ((kind == 2) | ((kind == 1) & near)) & (kind != 0).mT
        attended = torch.nn.functional.scaled_dot_product_attention(
            *states, attn_mask=seen, scale=head_dim**-0.5, enable_gqa=self.is_grouped
        )
        return attended.masked_fill(~seen.any(-1, keepdim=True), 0)

    @property
    def lengths(self) -> list[int]:
        """The window's reach in tokens and twice that, one less and one more."""
        reach = min(max(self.left, self.right, 1), 256) * max(self.dilation)
        return sorted({1, 31, 211, reach - 1, reach, reach + 1, 2 * reach, 2 * reach + 1} - {0})

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        step = self.dilation[head % len(self.dilation)]
        in_window = {query + step * offset for offset in range(-self.left, self.right + 1)}
        return [key for key, kind in enumerate(kinds) if kind == 2 or (kind == 1 and key in in_window)]


@dataclass(frozen=True, kw_only=True)
class Blocks(SparseLayer):
    """A node BlockSparseAttention; `listed` is the shape of a table with repeats and invalid entries."""

    operator = OPERATORS["BlockSparseAttention"]
    block: int = 8
    first: int = 1
    last: int = 1
    window: int = 1
    repeats: int = 0
    dense: int = 0
    by_row: int = 0
    listed: tuple[int, int, int] | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "block_size": self.block,
            "first_global": self.first,
            "last_global": self.last,
            "window": self.window,
            "first_repeats": self.repeats,
            "dense_tokens": self.dense,
            "ends_by_row": self.by_row,
        }

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """The table, [1 or heads, rows, listed], by its shape."""
        if self.listed is None:
            return {}
        table = np.random.default_rng(7).integers(-2, self.listed[1] + 4, self.listed)
        return {"table_" + "x".join(map(str, self.listed)): table.astype(np.int32)}

    @property
    def lengths(self) -> list[int]:
        """A few blocks, the longest dense text and the blocks of the window, one less and one more."""
        edges = {self.block, 2 * self.block, self.dense, self.block * (self.first + self.last + 2 * self.window + 1)}
        return sorted({1, 113, *(edge + shift for edge in edges if edge >= 0 for shift in (-1, 0, 1))} - {-1, 0})

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        tokens, size = len(kinds), self.block
        end = 1 + max((i for i in range(tokens) if kinds[i]), default=-1) if self.by_row else tokens
        last, own = math.ceil(end / size) - 1, query // size
        if end <= self.dense or own < self.first or (self.last and own == last):
            blocks = list(range(tokens // size + 1))
        else:
            near = range(own - self.window, own + self.window + 1)
            blocks = sorted({*range(self.first), *([last] if self.last else []), *near}) + [0] * self.repeats
            for table in self.constants.values():
                if own - self.first < table.shape[1]:
                    blocks += table[head % len(table), own - self.first].tolist()
        return [key for block in blocks for key in range(tokens) if key // size == block and kinds[key]]


@dataclass(frozen=True, kw_only=True)
class Chunks(SparseLayer):
    """A node ChunkAttention; `multiple` is in chunks."""

    operator = OPERATORS["ChunkAttention"]
    chunk: int = 8
    before: int = 1
    after: int = 0
    multiple: int = 1
    causal: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "chunk": self.chunk,
            "before": self.before,
            "after": self.after,
            "multiple": self.multiple * self.chunk,
            "causal": self.causal,
        }

    @property
    def lengths(self) -> list[int]:
        """A chunk, two and the multiple, one less and one more."""
        edges = {self.chunk, 2 * self.chunk, self.multiple * self.chunk}
        return sorted({1, 113, *(edge + shift for edge in edges for shift in (-1, 0, 1))} - {0})

    def chunks_by_hand(self, own: int, chunks: int) -> list[int]:
        """The chunks that one of a circle sees; `chunks` is their number."""
        return [(own + (step if abs(step) < chunks else 0)) % chunks for step in range(-self.before, self.after + 1)]

    def padded(self, tokens: int) -> int:
        """The tokens of a text with the padding that makes whole chunks of it."""
        whole = self.multiple * self.chunk
        return whole * math.ceil(max(tokens, 1) / whole)

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        size = self.chunk
        seen = self.chunks_by_hand(query // size, self.padded(len(kinds)) // size)
        keys = [size * chunk + place for chunk in seen for place in range(size)]
        return [key for key in keys if key < len(kinds) and kinds[key] and (key <= query or not self.causal)]


@dataclass(frozen=True, kw_only=True)
class Lsh(Chunks):
    """A node LSHAttention."""

    operator = OPERATORS["LSHAttention"]
    buckets: tuple[int, ...] = (4,)
    rounds: int = 2
    by_row: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return super().attributes | {"buckets": self.buckets, "rounds": self.rounds, "ends_by_row": self.by_row}

    @property
    def rotations(self) -> torch.Tensor:
        """[heads, head_dim, rounds, directions]."""
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "buckets": self.buckets, "rounds": self.rounds}
        return draw_rotations(7, **sizes)

    @property
    def constants(self) -> dict[str, np.ndarray]:
        rotations = self.rotations.numpy()
        return {"rotations_" + "x".join(map(str, rotations.shape)): rotations}

    def keys_of(self, states: Mapping[str, np.ndarray]) -> np.ndarray:
        vectors = states["query_key"]
        return vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6)

    def circle_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int) -> list[int]:
        """The tokens of all rounds in the order of their circle; -1 for what is padding."""
        circle: list[int] = []
        for number in range(self.rounds):
            found, start, group = np.zeros(len(kinds), np.int64), 0, 1
            for factor in self.buckets:
                half = vectors @ self.rotations.numpy()[head, :, number, start : start + factor // 2]
                found += group * np.concatenate([half, -half], axis=1).argmax(1)
                start, group = start + factor // 2, group * factor
            tokens = sorted(kinds.nonzero()[0].tolist(), key=found.__getitem__)
            padded = self.padded(len(tokens) if self.by_row else len(kinds))
            circle += tokens + [-1] * (padded - len(tokens))
        return circle

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        circle, size = self.circle_by_hand(kinds, vectors, head), self.chunk
        owns = [place // size for place, token in enumerate(circle) if token == query]
        seen = [chunk for own in owns for chunk in self.chunks_by_hand(own, len(circle) // size)]
        keys = [key for chunk in seen for key in circle[size * chunk : size * (chunk + 1)] if key not in (-1, query)]
        return [key for key in keys if key < query or not self.causal] or [query]

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Queries in each of their rounds with the keys of the chunks that they see there, by hand."""
        kinds, size, found = np.ones(tokens, np.int32), self.chunk, 0
        for head, vectors in enumerate(np.random.default_rng(tokens).normal(size=(self.heads, tokens, self.head_dim))):
            circle = np.array(self.circle_by_hand(kinds, vectors, head)).reshape(-1, size) >= 0  # [chunks, chunk]
            for own, queries in enumerate(circle):
                seen = sorted(set(self.chunks_by_hand(own, len(circle))))
                found += int(queries.sum() * circle[seen].sum())
        return found

    def decided(self, states: torch.Tensor) -> torch.Tensor:
        """Tokens whose two largest products are close in any round are drawn again."""
        generator = torch.Generator().manual_seed(states.shape[2])
        while True:
            products = torch.einsum("bhtd,hdrn->bhtrn", states.double(), self.rotations.double())
            parts = products.split([factor // 2 for factor in self.buckets], dim=-1)
            tops = [torch.cat([part, -part], dim=-1).topk(2).values for part in parts]
            gaps = torch.stack([top[..., 0] - top[..., 1] for top in tops]).amin((0, -1))  # [batch, heads, tokens]
            close = gaps < 1e-3 * states.double().norm(dim=-1)
            if not close.any():
                return states
            drawn = torch.randn(states.shape, generator=generator).to(states.dtype)
            states = torch.where(close[..., None], drawn, states)


@dataclass(frozen=True, kw_only=True)
class Description:
    """What tests of all sparse operators ask of one."""

    layers: Sequence[SparseLayer]  # the nodes whose bodies are compared with the definition at every length
    # nodes and masks, [batch, tokens], for which the definition is worked out by hand
    by_hand: Sequence[tuple[SparseLayer, np.ndarray]]
    # a node that is dense attention for a text of that many tokens, if there are such
    dense: tuple[SparseLayer, int] | None
    # attributes and inputs -> the message that refuses them, for two heads and a text of nine tokens
    undefined: Sequence[tuple[SparseLayer, dict[str, Any], str]]
    mixed: Sequence[tuple[SparseLayer, int]]  # nodes and lengths at which every padding meets every choice of globals
    # nodes, tokens, the first text's padding, texts, and whether it is tried nightly only
    long: Sequence[tuple[SparseLayer, int, str, int, bool]]
    measured: Sequence[SparseLayer]  # nodes whose measure is tried on wrong answers
    wrong: Callable[[Any], Sequence[SparseLayer]]  # of a measured node, nodes that must not pass for it
    # of a node and an order, how many nodes of some types its body has
    counts: Callable[[Any, BlockOrder], Mapping[str, int]]
    names: Mapping[SparseLayer, str]  # nodes and what their bodies are called
    bodiless: Sequence[tuple[SparseLayer, str]]  # nodes and the message that refuses a body for them
    # nodes that share a model of two bodies, and the error allowed, as measured
    chain: tuple[Sequence[SparseLayer], float]
    repeated: SparseLayer  # a node whose repetition computes its tables once
    # order of the blocks -> operators that three such nodes have as many of as one has, and how many if known
    once: Mapping[BlockOrder, Mapping[str, int | None]]
    choices: int  # nodes Where that every layer's parallel body has of its own
    wide: SparseLayer  # a node with four heads of 64 whose memory is measured
    built: Sequence[tuple[SparseLayer, bool]]  # nodes that TensorRT-RTX builds, and whether nightly only
    span: Callable[[Any], int]  # of a built node, the keys of one query that its parallel body holds scores of at most
    # nodes of a CPU graph -> the longest text whose queries attend to each key exactly once, or None
    lowered: Mapping[SparseLayer, int | None]
    lowered_atol: float  # of these, as measured
    lowered_chain: Sequence[SparseLayer]  # nodes that share a CPU graph
    lowered_long: Sequence[tuple[SparseLayer, int, int]]  # a node, tokens and texts
    # nodes of a CPU graph -> the loops of each of its bodies, and how many nodes have a branch of fused attention
    lowered_alike: tuple[Sequence[SparseLayer], Sequence[int], int]
    # nodes, shorter and longer tokens, and the texts of 512 tokens whose memory is compared
    lowered_wide: tuple[Sequence[SparseLayer], tuple[int, int], int]


def _scans(order: BlockOrder, sequential: int) -> dict[str, int]:
    return {"Scan": sequential if order is BlockOrder.SEQUENTIAL else 0}


_WINDOWS = (
    Window(left=1, right=1, bound=4, head_dim=64),
    Window(left=1, right=1, dtype="float16"),
    Window(left=16, right=16, bound=40, heads=1, dtype="float16"),
    Window(left=16, right=16, head_dim=80),
    Window(left=0, right=0, bound=3),
    Window(left=16, right=0, bound=5, dtype="float16"),
    Window(left=0, right=16),
    Window(left=7, right=64, bound=9, head_dim=80, dtype="float16"),
    Window(left=64, right=64, bound=64, head_dim=64),
    Window(left=64, right=64, dilation=(2,), bound=5),
    Window(left=16, right=16, dilation=(1, 3, 1, 2), heads=4, bound=5, dtype="float16"),
    Window(left=5, right=16, dilation=(4, 1), head_dim=64),
    Window(left=256, right=256, bound=5, heads=1, head_dim=64),
    Window(left=256, right=256, heads=1, dtype="float16"),
    Window(left=5000, right=5000, bound=5, heads=1),
    Window(left=16, right=16, heads=6, kv_heads=2, bound=5),
    Window(left=9, right=40, dilation=(2,), heads=4, kv_heads=1, head_dim=256, dtype="float16"),
    Window(left=5, right=16, dilation=(4, 1, 1, 4), heads=4, kv_heads=2, bound=3),
)
_GROUPED = _WINDOWS[15]
_FIVE = Window(left=16, right=16, bound=5)
_FEW_OF_MANY = Window(left=16, right=7, bound=40)
_TWO_STEPS = replace(_FIVE, dilation=(1, 3))
_WIDE_WINDOW = Window(left=256, right=256, heads=4, head_dim=64, dtype="float16")
_NO_STEP, _NEGATIVE = "is invalid: give one value", "is negative"

WINDOWS = Description(
    layers=_WINDOWS,
    by_hand=[
        (
            Window(left=left, right=right, dilation=dilation, bound=4),
            token_kinds("left", 13, globals_="scattered", bound=4),
        )
        for dilation in ((1,), (2, 1), (3,))
        for left, right in ((0, 0), (2, 1), (0, 3), (20, 20))
    ]
    + [(layer, token_kinds("holes", 37, globals_="scattered", bound=3)) for layer in _WINDOWS[15::2]],
    dense=(Window(left=64, right=64, bound=5), 61),
    undefined=[
        (Window(left=2, right=2, bound=4), change, message)
        for change, message in (
            ({"left": -1}, "-1 left and 2 right"),
            ({"right": -3}, "2 left and -3 right"),
            ({"dilation": [0]}, r"\[0\] does not fit 2 heads"),
            ({"dilation": []}, r"\[\] does not fit 2 heads"),
            ({"dilation": [1, 2, 3]}, r"\[1, 2, 3\] does not fit 2 heads"),
            ({"global_bound": 3}, "4 global tokens; the bound is 3"),
        )
    ],
    # With 40 globals in 33 tokens, a text is shorter than its bound; with 97, it is not.
    mixed=[*((_WINDOWS[2], tokens) for tokens in (1, 4, 33)), (_GROUPED, 97), (_WINDOWS[2], 97)],
    long=[
        *((_WINDOWS[number], 1000, "right", 1, False) for number in (8, 10, 12, 14, 16)),
        (Window(left=256, right=256, bound=40, heads=1), 4095, "left", 1, False),
        (Window(left=256, right=256, bound=40, heads=1), 4096, "left", 1, True),
    ],
    measured=[_WINDOWS[0], _WINDOWS[8], _WINDOWS[11], _GROUPED],
    wrong=lambda layer: [
        replace(layer, left=layer.left - 1),
        replace(layer, left=layer.left + 1),
        replace(layer, right=layer.right - 1),
        replace(layer, right=layer.right + 1),
        replace(layer, dilation=tuple(step + 1 for step in layer.dilation)),
    ],
    counts=lambda layer, order: {"TopK": layer.bound > 0} | _scans(order, len(set(layer.dilation))),
    names={
        Window(left=1, right=1): "SlidingWindowAttention",
        Window(left=1, right=1, dilation=(1, 1)): "SlidingWindowAttention",
        Window(left=1, right=1, bound=64): "SlidingWindowAttention_global64",
        Window(left=1, right=1, dilation=(2, 2)): "SlidingWindowAttention_dilation2",
        Window(left=1, right=1, dilation=(1, 3), bound=5): "SlidingWindowAttention_global5_dilation1_3",
        Window(left=1, right=1, kv_heads=2): "SlidingWindowAttention",
        Window(left=1, right=1, kv_heads=1, bound=64): "SlidingWindowAttention_grouped_global64",
    },
    bodiless=[
        (Window(left=1, right=1, dilation=()), _NO_STEP),
        (Window(left=1, right=1, dilation=(0,)), _NO_STEP),
        (Window(left=1, right=1, dilation=(1, -2)), _NO_STEP),
        (Window(left=1, right=1, bound=-1), _NEGATIVE),
    ],
    # Measured 1.7e-6: three layers hold what one holds.
    chain=(
        (
            Window(left=3, right=3, bound=5),
            Window(left=16, right=9, bound=5),
            Window(left=4, right=4, dilation=(2, 3), bound=5),
        ),
        4e-6,
    ),
    repeated=_WINDOWS[8],
    once={
        BlockOrder.PARALLEL: {"TopK": 1, "Range": None},
        # A Scan takes each table as often as there are texts.
        BlockOrder.SEQUENTIAL: {"TopK": 1, "Tile": 2},
    },
    choices=1,
    wide=replace(_WIDE_WINDOW, bound=40, dtype="float32"),
    built=[
        (_WIDE_WINDOW, True),
        (replace(_WIDE_WINDOW, bound=64), True),
        (replace(_WIDE_WINDOW, right=0, bound=64, head_dim=80, dtype="bfloat16"), False),
        (replace(_WIDE_WINDOW, kv_heads=2, head_dim=256), False),
        (replace(_WIDE_WINDOW, kv_heads=1, dilation=(2, 1, 1, 2), bound=5), True),
        (Window(left=64, right=64, bound=5, heads=4, head_dim=64), True),
        (Window(left=64, right=64, dilation=(1, 1, 2, 3), bound=5, heads=4, head_dim=64, dtype="float16"), True),
        (Window(left=64, right=64, dilation=(1, 3), bound=5, heads=2, head_dim=64), True),
    ],
    span=lambda layer: 128 + layer.left + layer.right + layer.bound,
    lowered={
        Window(left=16, right=16): 17,
        _FIVE: 17,
        _FEW_OF_MANY: 8,
        Window(left=0, right=16): 1,
        replace(_FIVE, dilation=(1, 1)): 17,
        _TWO_STEPS: None,
        Window(left=5000, right=5000, bound=3): 5001,
        Window(left=16, right=7, kv_heads=1, bound=5): 8,
        Window(left=16, right=7, kv_heads=1, dilation=(1, 3)): None,
    },
    lowered_atol=8e-6,  # measured 5.9e-6; values reach 5.7
    lowered_chain=(_FIVE, Window(left=64, right=64, bound=9), _TWO_STEPS, _FEW_OF_MANY, _FIVE),
    lowered_long=[
        (Window(left=256, right=256, bound=16), 1000, 2),
        (Window(left=256, right=256, bound=16), 4096, 1),
    ],
    lowered_alike=((Window(left=16, right=16), _FIVE, _FIVE, _TWO_STEPS), (1, 1, 2), 3),
    lowered_wide=((Window(left=256, right=256, bound=16), Window(left=64, right=64)), (4096, 8192), 8),
)

_BIGBIRD = Blocks(repeats=2, dense=72)
_LISTED = Blocks(dense=72, listed=(2, 14, 2))
_BLOCKS = (
    _BIGBIRD,
    replace(_BIGBIRD, by_row=1, dtype="float16"),
    _LISTED,
    replace(_LISTED, by_row=1, repeats=1, listed=(1, 5, 3), heads=3),
    Blocks(last=0, first=3),  # ETC
    Blocks(last=0, first=2, window=0, listed=(2, 9, 1), dtype="float16"),
    Blocks(first=0, last=0, window=-1, listed=(2, 11, 3)),  # any list of blocks
    Blocks(first=0, last=0, window=-1, listed=(1, 11, 3), dense=20, by_row=1),
    Blocks(first=3, window=2, block=5, repeats=1, by_row=1, head_dim=80, dtype="float16"),
    Blocks(first=0, window=0, repeats=3, block=1),
    Blocks(window=-1, dense=9, heads=1),
    Blocks(first=0, last=0, window=3, block=16, heads=1),
)
_WIDE_BLOCKS = Blocks(block=64, dense=704, heads=4, head_dim=64)

BLOCKS = Description(
    layers=_BLOCKS,
    by_hand=[
        (layer, token_kinds(padding, layer.dense + 3 * layer.block + 1, batch=2))
        for layer in _BLOCKS
        for padding in ("right", "holes")
    ],
    dense=(_BIGBIRD, 72),
    undefined=[
        (_LISTED, {"block_size": 0}, "block_size is 0; it must be 1 or more"),
        (_LISTED, {"window": -2}, "window is -2; it must be -1 or more"),
        (_LISTED, {"dense_tokens": -1}, "dense_tokens is -1; it must be 0 or more"),
        (
            _LISTED,
            {"listed_blocks": torch.zeros(3, 4, 2, dtype=torch.int32)},
            r"listed_blocks is \[3, 4, 2\]; with 2 heads it is \[1 or 2, rows, listed\]",
        ),
    ],
    # Half are 66 tokens: dense where texts end by row, and the table is one for blocks of longer texts.
    mixed=[(_BLOCKS[number], 131) for number in (1, 2, 7, 3)],
    long=[
        (
            Blocks(block=64, repeats=3, dense=704, listed=(1, 12, 2), heads=1, head_dim=64, by_row=1),
            1025,
            "right",
            2,
            False,
        ),
    ],
    measured=[_BIGBIRD, _BLOCKS[1], _LISTED],
    wrong=lambda layer: [
        replace(layer, repeats=layer.repeats + 1),
        replace(layer, first=0),
        replace(layer, first=2),
        replace(layer, last=0),
        replace(layer, window=0),
        replace(layer, window=2),
        replace(layer, block=layer.block + 1),
        replace(layer, by_row=1 - layer.by_row),
        replace(layer, dense=211),
        replace(layer, listed=(1, 5, 3)),
    ],
    counts=lambda layer, order: _scans(order, 1 + (layer.first + layer.last > 0)),
    names={_BIGBIRD: "BlockSparseAttention_first_last_window1_dense"},
    bodiless=[(Blocks(first=0, last=0, window=-1), "its queries see nothing")],
    # Measured 5.2e-7; values reach 1.6.
    chain=(
        (_BIGBIRD, _LISTED, replace(_BIGBIRD, block=16, dense=100), replace(_LISTED, listed=(1, 5, 3)), _BIGBIRD),
        2e-6,
    ),
    repeated=replace(_BIGBIRD, by_row=1),
    once={BlockOrder.SEQUENTIAL: dict.fromkeys(("ReduceMax", "Log", "Mod", "Equal", "Pad"))},
    choices=1,
    wide=replace(_WIDE_BLOCKS, listed=(4, 200, 3)),
    built=[
        (replace(_WIDE_BLOCKS, repeats=3, by_row=1, dtype="float16"), True),
        (replace(_WIDE_BLOCKS, listed=(4, 254, 3)), True),
        (replace(_WIDE_BLOCKS, dense=0, first=2, last=0, head_dim=80, dtype="bfloat16"), False),
        (
            replace(_WIDE_BLOCKS, dense=0, first=0, last=0, window=-1, listed=(1, 256, 5), dtype="float16"),
            True,
        ),
    ],
    span=lambda layer: max(
        64 * (layer.first + layer.last + 2 * layer.window + 1 + (layer.listed or (0, 0, 0))[2]), layer.dense
    ),
    lowered={
        _BIGBIRD: 72,
        replace(_BIGBIRD, by_row=1): 72,
        Blocks(listed=(2, 9, 2), dense=40): 40,
        Blocks(first=2, last=0): 32,
        Blocks(first=0, last=0, window=-1, listed=(1, 9, 3)): None,
        Blocks(block=5, window=-1, repeats=1): 10,
        Blocks(block=5, first=0, window=2): 20,
    },
    lowered_atol=6e-6,  # measured 2.7e-6; values reach 5.2
    lowered_chain=(
        _BIGBIRD,
        Blocks(listed=(2, 9, 2), dense=40),
        Blocks(first=2, last=0),
        Blocks(first=0, last=0, window=-1, listed=(1, 9, 3)),
        Blocks(listed=(1, 5, 3), dense=40),
        _BIGBIRD,
    ),
    lowered_long=[],
    lowered_alike=((_BIGBIRD, _BIGBIRD, replace(_BIGBIRD, block=16)), (2,), 3),
    lowered_wide=(
        (Blocks(block=64, repeats=3, dense=300), Blocks(block=64, listed=(2, 254, 3))),
        (8192, 16384),
        16,
    ),
)

_CHUNKS = (
    Chunks(),
    Chunks(dtype="float16", multiple=2),
    Chunks(before=0, after=0, heads=1),
    Chunks(before=1, after=1, head_dim=80),
    Chunks(before=0, after=2, causal=1),
    Chunks(before=2, causal=1, dtype="float16"),
    Chunks(chunk=1, before=3, after=3, multiple=7),
    Chunks(chunk=5, before=3, multiple=3, heads=3),
    Chunks(chunk=64, head_dim=64),
)
_WIDE_CHUNKS = Chunks(chunk=64, heads=4, head_dim=64)

CHUNKS = Description(
    layers=_CHUNKS,
    by_hand=[
        (layer, token_kinds(padding, tokens, batch=2))
        for layer in (_CHUNKS[1], *_CHUNKS[3:8])
        for padding, tokens in (("right", 29), ("holes", 13), ("none", 5))
    ],
    dense=(_CHUNKS[0], 8),
    undefined=[
        (_CHUNKS[0], {"chunk": 0}, "chunk is 0; it must be 1 or more"),
        (_CHUNKS[0], {"before": -1}, "before is -1; it must be 0 or more"),
        (_CHUNKS[0], {"after": -2}, "after is -2; it must be 0 or more"),
        (_CHUNKS[0], {"multiple": 12}, "multiple is 12; it must be a multiple of the chunk's 8 tokens"),
        (_CHUNKS[0], {"causal": 2}, "causal is 2; it must be 0 or 1"),
    ],
    mixed=[(_CHUNKS[3], 45), (_CHUNKS[4], 33)],
    long=[
        (_CHUNKS[8], 1025, "right", 2, False),
        (Chunks(chunk=64, heads=1), 16384, "right", 1, False),
    ],
    measured=[_CHUNKS[0], _CHUNKS[1], _CHUNKS[4]],
    wrong=lambda layer: [
        replace(layer, before=layer.before + 1),
        replace(layer, after=layer.after + 1),
        replace(layer, chunk=layer.chunk + 1),
        replace(layer, causal=1 - layer.causal),
    ],
    counts=lambda layer, order: {"TopK": 0, "ScatterElements": 0} | _scans(order, 1),
    names={
        _CHUNKS[0]: "ChunkAttention_chunk8_before1_after0_of8",
        _CHUNKS[4]: "ChunkAttention_chunk8_before0_after2_of8_causal",
    },
    bodiless=[(Chunks(chunk=0), "chunk is 0"), (Chunks(before=-1), "before is -1")],
    # Measured 1.9e-6; values reach 2.9.
    chain=((_CHUNKS[0], Chunks(after=1, multiple=2), _CHUNKS[0]), 4e-6),
    repeated=_CHUNKS[0],
    once={BlockOrder.PARALLEL: {"Range": None, "Less": 1}},
    choices=1,
    wide=_WIDE_CHUNKS,
    built=[
        (replace(_WIDE_CHUNKS, dtype="float16"), False),
        (replace(_WIDE_CHUNKS, after=1, multiple=4, causal=1), True),
    ],
    span=lambda layer: layer.chunk * (layer.before + 1 + layer.after),
    lowered=dict.fromkeys((_CHUNKS[0], _CHUNKS[4], Chunks(chunk=5, before=3, multiple=3))),
    lowered_atol=6e-6,  # measured 2.9e-6; values reach 6.4
    lowered_chain=(_CHUNKS[0], Chunks(after=1, multiple=2), _CHUNKS[0]),
    lowered_long=[],
    lowered_alike=((_CHUNKS[0], _CHUNKS[0], Chunks(after=1)), (1, 1), 0),
    lowered_wide=((Chunks(chunk=64), Chunks(chunk=64, after=1)), (16384, 32768), 32),
)

_LSH = (
    Lsh(),
    Lsh(dtype="float16", rounds=3, multiple=2),
    Lsh(rounds=1, before=0, heads=1),
    Lsh(buckets=(4, 2), after=1, by_row=1),
    Lsh(buckets=(2,), rounds=4, causal=1, dtype="float16", by_row=1),
    Lsh(chunk=1, before=2, after=2, multiple=5),
    Lsh(chunk=5, before=3, multiple=3, buckets=(6, 4, 2), heads=3),
    Lsh(rounds=1, causal=1, head_dim=80),
    Lsh(chunk=64, buckets=(4, 8), head_dim=64),
)
_WIDE_LSH = Lsh(chunk=64, buckets=(16, 32), heads=4, head_dim=64)
_FEW_LSH = Lsh(chunk=64, buckets=(16, 32), heads=1)

LSH = Description(
    layers=_LSH,
    by_hand=[
        (layer, token_kinds(padding, tokens, batch=2))
        for layer in (*_LSH[:2], *_LSH[3:8])
        for padding, tokens in (("right", 29), ("holes", 13), ("none", 5), ("none", 1))
    ],
    dense=None,  # a token does not see itself
    undefined=[
        (_LSH[0], {"chunk": 0}, "chunk is 0; it must be 1 or more"),
        (_LSH[0], {"multiple": 12}, "multiple is 12; it must be a multiple of the chunk's 8 tokens"),
        (_LSH[0], {"buckets": [3]}, r"buckets is \[3\]; it must be even numbers of 2 or more"),
        (_LSH[0], {"buckets": []}, r"buckets is \[\]; it must be"),
        (_LSH[0], {"rounds": 0}, "rounds is 0; it must be 1 or more"),
        (_LSH[0], {"rounds": 3}, r"rotations is \[2, 32, 2, 2\]; .* \[2, 32, 3, 2\]"),
        (_LSH[0], {"ends_by_row": 2}, "ends_by_row is 2; it must be 0 or 1"),
    ],
    mixed=[(_LSH[0], 33), (_LSH[3], 45), (_LSH[4], 33)],
    long=[
        (_LSH[8], 1025, "right", 2, False),
        (_FEW_LSH, 4097, "right", 1, False),
        *((_FEW_LSH, tokens, "right", 1, tokens < 7680) for tokens in (4095, 4096, 7680, 7681)),
        (replace(_FEW_LSH, heads=2, rounds=4), 16384, "holes", 1, True),
        (_FEW_LSH, 16384, "none", 1, False),
    ],
    measured=[_LSH[0], _LSH[1], _LSH[3]],
    wrong=lambda layer: [
        replace(layer, before=layer.before + 1),
        replace(layer, after=layer.after + 1),
        replace(layer, chunk=layer.chunk + 1),
        replace(layer, causal=1 - layer.causal),
        replace(layer, rounds=layer.rounds + 1),
        replace(layer, buckets=(*layer.buckets, 2)),
        replace(layer, by_row=1 - layer.by_row),
    ],
    # TensorRT's TopK takes 3840 numbers: in parallel, a count sorts.
    counts=lambda layer, order: {"TopK": order is BlockOrder.SEQUENTIAL, "ScatterElements": 1} | _scans(order, 2),
    names={
        _LSH[0]: "LSHAttention_chunk8_before1_after0_of8_rounds2_buckets4",
        _LSH[3]: "LSHAttention_chunk8_before1_after1_of8_rounds2_buckets4x2_byrow",
    },
    bodiless=[(Lsh(chunk=0), "chunk is 0"), (Lsh(buckets=(5,)), "even numbers"), (Lsh(rounds=0), "rounds is 0")],
    # Measured 1.4e-6; values reach 2.8.
    chain=((_LSH[0], Lsh(after=1), _LSH[0]), 4e-6),
    repeated=_LSH[3],
    once={BlockOrder.PARALLEL: {"Max": 1, "Less": 1}},
    choices=3,
    wide=_WIDE_LSH,
    built=[
        (replace(_WIDE_LSH, dtype="float16", by_row=1), False),
        (replace(_WIDE_LSH, rounds=1, after=1, multiple=4, causal=1), True),
        (replace(_WIDE_LSH, rounds=4, dtype="bfloat16"), True),
    ],
    span=lambda layer: layer.rounds * layer.chunk * (layer.before + 1 + layer.after),
    lowered=dict.fromkeys((_LSH[0], _LSH[3], Lsh(rounds=1), Lsh(chunk=5, before=3, multiple=3, causal=1))),
    lowered_atol=2e-5,  # measured 1.1e-5 in a chain, where PyTorch's is 2.6e-5; values reach 5.4
    lowered_chain=(_LSH[0], Lsh(after=1), _LSH[0]),
    lowered_long=[(replace(_FEW_LSH, heads=2), 4097, 1)],
    lowered_alike=((_LSH[0], _LSH[0], Lsh(after=1)), (2, 2), 0),
    lowered_wide=((Lsh(chunk=64, buckets=(16, 32)), Lsh(chunk=64, rounds=1)), (8192, 16384), 16),
)

DESCRIPTIONS = {
    "BlockSparseAttention": BLOCKS,
    "ChunkAttention": CHUNKS,
    "LSHAttention": LSH,
    "SlidingWindowAttention": WINDOWS,
}
