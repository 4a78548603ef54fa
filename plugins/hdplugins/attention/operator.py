"""The specification of an operator: a name, a signature, and faces that are loaded on demand."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple


class BlockOrder(str, Enum):
    """The order in which a function body computes the blocks of a text.

    Attributes:
        PARALLEL: all blocks of a head are one batch of products, or a step of a loop takes a block of all heads.
        SEQUENTIAL: a step of a loop takes one block, which fits in the caches of a CPU.
    """

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


class Range(NamedTuple):
    """Whole numbers from `least` to `most`, both included; None for no upper bound."""

    least: int
    most: int | None = None


FLAG = Range(0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """The specification of one operator of the ONNX domain ``hdexport``.

    A face is a module of the operator's folder: ``reference`` (the semantics), ``graph`` (the bodies of standard ONNX
    operators), ``kernel`` and ``plugin``.

    Attributes:
        name: the operator type in the graph.
        version: the version, which grows when the semantics change.
        package: the import path of the operator's folder.
        inputs: the names of the inputs, in order: the states, the mask, and others.
        states: the number of leading inputs of shape [batch, tokens, heads, head_dim], a view of what projections make.
            The states behind the first one may have more tokens, the tokens of the keys. The mask, [batch, tokens] of
            the last state, is next.
        groups_heads: whether keys and values may have fewer heads than queries. If so, `heads` is a multiple of
            `kv_heads`, and head h of the queries sees head h // (heads // kv_heads) of the keys. `bodies` of the face
            `graph` takes ``grouped``.
        optional_inputs: the trailing inputs that a node may leave out.
        attributes: the names of the attributes, in order, each with the range that `check` holds it to; None for those
            that are no whole number, or that `check_fit` judges.
        check_fit: refuses attributes that are in their ranges and define nothing together, by a ValueError.
        pairs: (attributes, ``tokens`` of a text without padding, ``heads``) -> the queries and keys that see each other
            in all heads, each pair once: the amount of work, linear in tokens to compute. By default every query sees
            every key. The attributes are those of a node; ``memory``, tokens that are remembered, and
            ``global_tokens``, where there are any; and ``listed_blocks``, the node's table.
        products: the matrix products of each pair; by default query by key, and weight by value.
        as_dense: the attributes by which every query sees every key; None where that is dense attention.
        counts_in_floats: whether the parallel body counts tokens in floats: half precision rounds the counts.
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
        function: Callable[..., Any] = getattr(self.face("reference"), words.lower())
        return function

    def check(self, **attributes: Any) -> None:
        """Refuse attributes that define nothing, by a ValueError; those that are left out are not judged."""
        for name, range_ in self.attributes.items():
            if range_ is not None and name in attributes:
                number, (least, most) = attributes[name], range_
                if number < least or (most is not None and number > most):
                    fits = (
                        f"{least} or more" if most is None else f"{least} {'or' if most == least + 1 else 'to'} {most}"
                    )
                    raise ValueError(f"{name} is {number}; it must be {fits}.")
        self.check_fit(attributes)

    def face(self, face: str) -> ModuleType:
        """Import a face such as ``"graph"``, with the packages that it alone needs.

        Raises:
            ModuleNotFoundError: the operator has no such face, or a package that the face needs is not installed.
        """
        return importlib.import_module(f"{self.package}.{face}")

    def has_face(self, face: str) -> bool:
        """Whether the operator has that face; only the operator's folder is imported."""
        return importlib.util.find_spec(f"{self.package}.{face}") is not None
