"""Lowering: what replaces an operator's nodes in the graph of each backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hdexport.lowering.nodes import add_function, body_of
from hdplugins.attention.operator import BodyVariant

if TYPE_CHECKING:
    import onnx_ir

ENGINES = "tensorrt"
"""In `Lowering.fused`, the engines of both variants of TensorRT."""

_Part = TypeVar("_Part")


class SharedParts:
    """Values and functions that several nodes of one lowered graph share: masks, tables, conditions.

    Attributes:
        model: the graph.
        padded: whether batches may have padding.
    """

    def __init__(self, model: onnx_ir.Model, *, padded: bool = True) -> None:
        self.model, self.padded = model, padded
        self._parts: dict[Hashable, Any] = {}
        self._names = Counter[str]()

    def once(self, key: Hashable, make: Callable[[], _Part]) -> _Part:
        """The part of a key; `make` creates it before the first node that needs it."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def new_name(self, prefix: str) -> str:
        """A name with a prefix that no other node of the graph has."""
        self._names[prefix] += 1
        return f"{prefix}_{self._names[prefix] - 1}"


class Lowering:
    """What replaces an operator's nodes in the graph of each backend; a subclass overrides what differs.

    By default, ONNX Runtime runs the operator's blockwise body on a CPU, and the batched body on a GPU; an engine has
    hdexport's plugin or the batched body, and other backends have the batched body.

    Attributes:
        operator: the name of the operator.
        fused: the lowering of a backend's graphs, as manifests name it, or `ENGINES` -> the dtypes in which a fused
            kernel of the backend computes the operator.
        fuses_short_sequences: whether ONNX Runtime's fused kernel computes short sequences on a CPU.
    """

    operator: ClassVar[str]
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    fuses_short_sequences: ClassVar[bool] = False

    def is_dense(self, node: onnx_ir.Node) -> bool:
        """Return whether the fused kernels of GPUs can compute a node: dense attention, perhaps with a bias."""
        return False

    def has_bias(self, node: onnx_ir.Node) -> bool:
        """Return whether a dense node has a bias that all sequences share; `relative_position_bias` makes the bias."""
        return False

    def for_onnxruntime_cpu(self, node: onnx_ir.Node, parts: SharedParts) -> None:
        """Replace a node of a float32 graph, or give the node its body, in place."""
        add_function(parts.model, body_of(node, BodyVariant.BLOCKWISE))
