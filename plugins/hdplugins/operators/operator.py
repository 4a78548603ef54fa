"""The specification of an operator: a name, a signature, and faces that are loaded on demand."""

from __future__ import annotations

__all__ = ["BlockOrder", "Operator"]

import importlib
import importlib.util
from dataclasses import dataclass
from enum import Enum
from types import ModuleType


class BlockOrder(str, Enum):
    """The order in which a function body computes the blocks of a text.

    Attributes:
        PARALLEL: all blocks of a head are one batch of products, or a step of a loop takes a block of all heads.
        SEQUENTIAL: a step of a loop takes one block, which fits in the caches of a CPU.
    """

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The specification of one operator of the ONNX domain ``hdexport``.

    A face is a module of the operator's folder: ``reference`` (the semantics), ``graph`` (a body of
    standard ONNX operators), ``pairs`` (how much work it is), ``triton_kernel`` and ``tensorrt_plugin``.

    Attributes:
        name: operator type in the graph.
        version: grows when the semantics change.
        package: import path of the operator's folder.
        inputs: names of the inputs, in order: the states, the mask, and others.
        states: number of leading inputs of shape [batch, heads, tokens, head_dim]; behind the first, `tokens` may be
            more: those of keys. The mask, [batch, tokens] of the last state, is next.
        groups_heads: whether keys and values may have fewer heads, kv_heads: `heads` is a multiple of them, and head h
            of the queries sees head h // (heads // kv_heads) of the keys. The face `graph` is told by
            ``grouped``.
        optional_inputs: the trailing inputs that a node may leave out.
        attributes: names of the attributes.
    """

    name: str
    version: int
    package: str
    inputs: tuple[str, ...]
    states: int = 3
    groups_heads: bool = False
    optional_inputs: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states; the result has the shape and dtype of the first."""
        return self.inputs[: self.states]

    @property
    def mask(self) -> str:
        """Name of the mask."""
        return self.inputs[self.states]

    def face(self, face: str) -> ModuleType:
        """Import one face, with the packages that it alone needs.

        Args:
            face: module name, e.g. ``"graph"``.

        Raises:
            ModuleNotFoundError: the operator has no such face, or what the face needs is not installed.
        """
        return importlib.import_module(f"{self.package}.{face}")

    def has_face(self, face: str) -> bool:
        """Whether the operator has that face; nothing is imported but the operator's folder."""
        return importlib.util.find_spec(f"{self.package}.{face}") is not None
