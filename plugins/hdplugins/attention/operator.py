"""`Operator`: an operator's name, signature, and implementations, which are imported on demand."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any, NamedTuple


class BodyVariant(StrEnum):
    """How a function body computes the blocks of a sequence.

    Attributes:
        BATCHED: all blocks of a head are one batched matmul, or a step of a loop computes one block of all heads.
        BLOCKWISE: a step of a loop computes one block, which fits in the caches of a CPU.
    """

    BATCHED = "batched"
    BLOCKWISE = "blockwise"


class Range(NamedTuple):
    """Integers from `min` to `max`, both included; None for no upper bound."""

    min: int
    max: int | None = None


FLAG = Range(0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """The specification of one operator of the ONNX domain ``hdexport``.

    An implementation is a module of the operator's folder: ``reference`` (PyTorch, which defines the semantics),
    ``onnx_functions`` (function bodies of standard ONNX operators), ``kernel`` (Triton) and ``plugin``.

    Attributes:
        name: the operator type in the graph.
        version: the version, which increases when the semantics change.
        package: the import path of the operator's folder.
        inputs: the names of the inputs, in order: the states, the mask, and others.
        states: the number of leading inputs of shape [batch, tokens, heads, head_dim], each a view of a linear layer's
            output. States after the first one may have more tokens, the tokens of the keys. The next input is the mask,
            [batch, tokens] of the last state.
        groups_heads: whether keys and values may have fewer heads than queries. If so, `heads` is a multiple of
            `kv_heads`, and head h of the queries sees head h // (heads // kv_heads) of the keys. `function_bodies` of
            ``onnx_functions`` then takes ``grouped``.
        optional_inputs: the trailing inputs that a node may leave out.
        attributes: the names of the attributes, in order, each with its accepted range; None if the attribute is not an
            integer, or is checked by `check_fit`.
        check_fit: raises a ValueError for attributes that are in their ranges but contradict each other.
        pairs: (attributes, ``tokens`` of a sequence without padding, ``heads``) -> the number of (query, key) pairs
        that
            see each other in all heads, each pair once: the amount of work, linear in tokens to compute. By default
            every query sees every key. The attributes are the node's attributes; ``memory``, the number of cached
            tokens, and ``global_tokens``, if there are any; and ``listed_blocks``, the node's table.
        products: the matmuls of each pair; by default two, query by key and weight by value.
        as_dense: the attributes with which every query sees every key; None for dense attention.
        counts_in_floats: whether the batched body counts tokens in floats: half precision rounds the counts.
    """

    name: str
    version: int
    package: str
    inputs: tuple[str, ...]
    states: int = 3
    groups_heads: bool = False
    optional_inputs: tuple[str, ...] = ()
    attributes: Mapping[str, Range | None] = field(default_factory=dict)
    check_fit: Callable[[Mapping[str, Any]], None] = lambda attributes: None
    pairs: Callable[..., int] = lambda attributes, *, tokens, heads: heads * tokens * tokens
    products: int = 2
    as_dense: Mapping[str, int] | None = None
    counts_in_floats: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states; the result has the shape and dtype of the first state."""
        return self.inputs[: self.states]

    @property
    def mask(self) -> str:
        """The name of the mask."""
        return self.inputs[self.states]

    @property
    def definition(self) -> Callable[..., Any]:
        """The function of ``reference`` that defines the operator: tensors as ``inputs``, attributes by name."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name)
        return getattr(self.implementation("reference"), words.lower())

    def check(self, **attributes: Any) -> None:
        """Raise a ValueError for attributes out of range, or that contradict each other; absent ones are ignored."""
        for name, range_ in self.attributes.items():
            if range_ is not None and name in attributes:
                value, (minimum, maximum) = attributes[name], range_
                if value < minimum or (maximum is not None and value > maximum):
                    to = "or" if maximum == minimum + 1 else "to"
                    accepted = f"{minimum} or more" if maximum is None else f"{minimum} {to} {maximum}"
                    raise ValueError(f"{name} is {value}; it must be {accepted}.")
        self.check_fit(attributes)

    def implementation(self, name: str) -> ModuleType:
        """Import an implementation such as ``"onnx_functions"``, with the packages that this implementation needs.

        Raises:
            ModuleNotFoundError: the operator has no such implementation, or a package is not installed.
        """
        return importlib.import_module(f"{self.package}.{name}")

    def has_implementation(self, name: str) -> bool:
        """Return whether the operator has that implementation; only the operator's folder is imported."""
        return importlib.util.find_spec(f"{self.package}.{name}") is not None
