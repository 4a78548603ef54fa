"""The specification of an operator: a name, a signature, and faces that are loaded on demand."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any


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

    A face is a module of the operator's folder: ``reference`` (the semantics), ``graph`` (the bodies of standard ONNX
    operators), ``pairs`` (the amount of work), ``kernel`` and ``plugin``.

    Attributes:
        name: the operator type in the graph.
        version: the version, which grows when the semantics change.
        package: the import path of the operator's folder.
        inputs: the names of the inputs, in order: the states, the mask, and others.
        states: the number of leading inputs of shape [batch, heads, tokens, head_dim]. The states behind the first one
            may have more tokens, the tokens of the keys. The mask, [batch, tokens] of the last state, is next.
        groups_heads: whether keys and values may have fewer heads than queries. If so, `heads` is a multiple of
            `kv_heads`, and head h of the queries sees head h // (heads // kv_heads) of the keys. `bodies` of the face
            `graph` takes ``grouped``.
        optional_inputs: the trailing inputs that a node may leave out.
        attributes: the names of the attributes.
        faster_in_openvino: the precisions in which OpenVINO was measured to be faster on a CPU than ONNX Runtime, by
            more than a tenth; docs/openvino.md has the numbers of all operators. A precision in which OpenVINO takes
            more memory for that is not listed, except windows in float32, which take twice as much for a text.
        counts_in_floats: whether the parallel body counts tokens in floats: half precision rounds the counts.
    """

    name: str
    version: int
    package: str
    inputs: tuple[str, ...]
    states: int = 3
    groups_heads: bool = False
    optional_inputs: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    faster_in_openvino: tuple[str, ...] = ()
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

    def face(self, face: str) -> ModuleType:
        """Import one face, with the packages that the face alone needs.

        Args:
            face: the name of the module, e.g. ``"graph"``.

        Raises:
            ModuleNotFoundError: the operator has no such face, or a package that the face needs is not installed.
        """
        return importlib.import_module(f"{self.package}.{face}")

    def has_face(self, face: str) -> bool:
        """Return whether the operator has that face; only the operator's folder is imported."""
        return importlib.util.find_spec(f"{self.package}.{face}") is not None
