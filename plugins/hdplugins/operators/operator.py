"""What an operator is: a name, a signature, and faces that are loaded on demand."""

from __future__ import annotations

__all__ = ["Operator"]

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The specification of one operator of the ONNX domain ``hdexport``.

    A face is a module of the operator's folder: ``reference`` (the semantics), ``onnx_function`` (a body of
    standard ONNX operators), ``pairs`` (how much work it is), ``triton_kernel`` and ``tensorrt_plugin``.

    Attributes:
        name: operator type in the graph.
        version: grows when the semantics change.
        package: import path of the operator's folder.
        inputs: names of the inputs, in order: the states, the mask, and others.
        states: number of leading inputs of shape [batch, heads, tokens, head_dim]; behind the first, `tokens` may be
            more: those of keys. The mask, [batch, tokens] of the last state, is next.
        groups_heads: whether keys and values may have fewer heads, kv_heads: `heads` is a multiple of them, and head h
            of the queries sees head h // (heads // kv_heads) of the keys. The face `onnx_function` is told by
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
            face: module name, e.g. ``"onnx_function"``.

        Raises:
            ModuleNotFoundError: the operator has no such face, or what the face needs is not installed.
        """
        return importlib.import_module(f"{self.package}.{face}")

    def has_face(self, face: str) -> bool:
        """Whether the operator has that face; nothing is imported but the operator's folder."""
        return importlib.util.find_spec(f"{self.package}.{face}") is not None
