"""A node of an attention operator as tests need it, and what tests of all sparse operators ask of one."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import torch

from hdplugins import Operator
from hdplugins.attention.function_bodies import function_of_node
from hdplugins.attention.operator import BodyVariant

PADDINGS = ("none", "right", "left", "holes", "all")
GLOBALS = ("none", "first", "scattered", "all")


def token_kinds(padding: str, tokens: int, *, globals_: str = "none", bound: int = 0, batch: int = 3) -> np.ndarray:
    """[batch, tokens], int32; the first text has the padding, all have globals, differently many where scattered.

    "unseen", of windows alone, is a text with tokens behind it that see it and are not seen, and some padding.
    """
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
    elif padding == "unseen":
        kinds[0, (tokens + 2) // 3 :] = -1
        kinds[0, tokens - tokens // 5 :] = 0
    for number, row in enumerate(kinds):
        (real,) = (row == 1).nonzero()
        if globals_ == "first":
            row[real[: min(1, bound)]] = 2
        elif globals_ == "scattered":
            row[generator.permutation(real)[: max(min(bound, len(real)) - number, 0)]] = 2
        elif globals_ == "all":
            row[real[:bound]] = 2
    return kinds


def filled(inputs: dict[str, np.ndarray], where: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with 50 for states, [batch, tokens, heads, head_dim], of such tokens, [batch, tokens]."""
    for name, tokens in where.items():
        inputs[name][tokens] = 50.0
    return inputs


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

    def body(self, variant: BodyVariant = BodyVariant.BATCHED) -> onnx.FunctionProto:
        """A function body; the batched one is in the portable graph."""
        described: dict[str, Any] = {"attributes": self.node_attributes, "grouped": self.is_grouped}
        inputs = self.operator.states + len(self.inputs)
        function = function_of_node(self.operator, inputs=inputs, variant=variant, **described)
        return ir.serde.serialize_function(function)

    @property
    def answers_padding(self) -> bool:
        """Whether a query of padding has an answer, and not 0."""
        return False

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Inputs that are initializers, by name."""
        return {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """After the states."""
        return (self.operator.mask, *self.constants)

    @property
    def axes(self) -> dict[str, Sequence[str | int]]:
        """The axes of each input that is no constant, of optional ones too."""
        states = self.operator.state_names
        axes = {name: ("batch", "tokens", self.heads_of(name), self.head_dim) for name in states}
        return {**axes, self.operator.mask: ("batch", "tokens")}

    def decided(self, states: torch.Tensor) -> torch.Tensor:
        """First states, [batch, tokens, heads, head_dim], by which rounding decides nothing: here any."""
        return states

    def by_definition(
        self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor], **changes: Any
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim], of states of that shape; `changes` are attributes and inputs."""
        tensors = {**feeds, **{name: torch.from_numpy(table) for name, table in self.constants.items()}}
        given = [*states, *(tensors[name] for name in self.inputs)]
        arguments = dict(zip(self.operator.inputs, given, strict=False))
        arguments |= {**self.attributes, "scale": states[0].shape[-1] ** -0.5, **changes}
        definition: Callable[..., torch.Tensor] = self.operator.definition
        return definition(**arguments)

    def by_pytorch(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """PyTorch's answer in the states' dtype, whose error is what a kernel is measured by."""
        return self.by_definition(states, feeds)

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Weights above 0 of the definition where all scores are equal: values are unit vectors, which show them."""
        *others, last = self.operator.state_names
        nothing = [torch.zeros(1, tokens, self.heads_of(name), 1) for name in others]
        values = torch.eye(tokens)[:, None].expand(1, tokens, self.heads_of(last), tokens)
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
        """What queries, the first states, are multiplied with: [batch, tokens, heads, head_dim]."""
        return states["key"]


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
    counts: Callable[[Any, BodyVariant], Mapping[str, int]]
    names: Mapping[SparseLayer, str]  # nodes and what their bodies are called
    bodiless: Sequence[tuple[SparseLayer, str]]  # nodes and the message that refuses a body for them
    # nodes that share a model of two bodies, and the error allowed, as measured
    chain: tuple[Sequence[SparseLayer], float]
    repeated: SparseLayer  # a node whose repetition computes its tables once
    # order of the blocks -> operators that three such nodes have as many of as one has, and how many if known
    once: Mapping[BodyVariant, Mapping[str, int | None]]
    choices: int  # nodes Where of the batched body of every layer
    wide: SparseLayer  # a node with four heads of 64 whose memory is measured
    built: Sequence[tuple[SparseLayer, bool]]  # nodes that TensorRT-RTX builds, and whether nightly only
    span: Callable[[Any], int]  # maximum number of keys per query whose scores the batched body of a built node holds
    # nodes of a CPU graph -> the longest text whose queries attend to each key exactly once, or None
    lowered: Mapping[SparseLayer, int | None]
    lowered_atol: float  # of these, as measured
    lowered_chain: Sequence[SparseLayer]  # nodes that share a CPU graph
    lowered_long: Sequence[tuple[SparseLayer, int, int]]  # a node, tokens and texts
    # nodes of a CPU graph -> the loops of each of its bodies, and how many nodes have a branch of fused attention
    lowered_alike: tuple[Sequence[SparseLayer], Sequence[int], int]
    # nodes, shorter and longer tokens, and the texts of 512 tokens whose memory is compared
    lowered_wide: tuple[Sequence[SparseLayer], tuple[int, int], int]


Feeds = Mapping[str, np.ndarray]
"""Inputs of a node by name."""


Cases = Iterable[tuple[tuple[object, ...], Feeds]]
"""Names, and inputs of a node."""

Wrong = tuple[Feeds, Sequence[tuple[Layer, Feeds, dict[str, Any]]]]
"""Inputs of a node, and nodes, inputs and attributes whose answers must not pass for the node's."""


def alternating(inputs_of: Callable[[Any, np.ndarray], Feeds], node: Layer, lengths: Iterable[int]) -> Cases:
    """Cases of these lengths, whose paddings and batches alternate."""
    for tokens, padding, batch in zip(lengths, itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3)), strict=False):
        yield (tokens, padding, batch), inputs_of(node, token_kinds(padding, tokens, batch=batch))


def filled_padding(inputs_of: Callable[[Any, np.ndarray], Any], node: Layer) -> tuple[Feeds, Feeds]:
    """Inputs of texts with holes, and the same with other keys and values in them."""
    kinds = token_kinds("holes", 297)
    return inputs_of(node, kinds), filled(inputs_of(node, kinds), {"key": kinds == 0, "value": kinds == 0})


def without_a_key(inputs: Any) -> Feeds:
    """The inputs with a third text that has no real key, and must be 0."""
    inputs["key_mask"][2] = False
    return inputs  # type: ignore[no-any-return]


def by_inputs(node: Any, inputs: Any, changed: Callable[[Any, Any], Iterable[Feeds]]) -> Wrong:
    """Wrong by inputs that are changed, and by another scale."""
    by_scale = (node, inputs, {"scale": 1.01 * node.head_dim**-0.5})
    return inputs, [*((node, each, {}) for each in changed(node, inputs)), by_scale]


@dataclass(frozen=True, kw_only=True)
class BodyDescription:
    """What tests of the bodies of an operator by distance ask of it; all inputs are made when they are asked for."""

    lengths: Callable[[Any], Cases]  # of a node, every length
    paddings: Callable[[Any], Cases]  # of a node, every padding
    usual: Callable[[Any], Feeds]  # of a node, a text that is long enough to show the effect of rounding
    rounds_by_text: bool = False  # whether each text's own effect counts as well
    zero: Callable[[Feeds, int], np.ndarray]  # of inputs and tokens, [batch, tokens], whose answers are 0
    unseen: tuple[Sequence[Layer], Callable[[Any], tuple[Feeds, Feeds]]]  # nodes, and inputs that answer alike
    large: tuple[Layer, Callable[[Any], Feeds], float] | None  # a node, large states, and the error that was measured
    # nodes of a chain, the inputs of the first, the bodies that they share, and the error that was measured
    chain: tuple[Sequence[Layer], Callable[[Any], Feeds], int, float]
    wrong: Callable[[Any], Wrong]
    # a node, its inputs, and order -> mistakes in its body that change no answer, and the reason
    mistaken: tuple[Layer, Callable[[Any], Feeds], Mapping[BodyVariant, Mapping[str, str]]]
    counts: Callable[[Any, BodyVariant], Mapping[str, int]]  # nodes of a body by type; MatMul counts Gemm as well
    names: Mapping[Layer, str]  # nodes and what their bodies are called
    distinct: Sequence[Layer] = ()  # nodes whose bodies all differ
    # a node, its inputs, and changes of attributes and inputs -> the message that refuses them
    undefined: tuple[Layer, Callable[[Any], Feeds], Sequence[tuple[dict[str, Any], str]]]
    bodiless: Sequence[tuple[Layer, str]]  # nodes and the message that refuses a body for them


def scans(variant: BodyVariant, blockwise: int) -> dict[str, int]:
    """Loops of a body that has some in sequence alone."""
    return {"Scan": blockwise if variant is BodyVariant.BLOCKWISE else 0}
