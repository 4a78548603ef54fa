"""A model and its graphs without the layers that repeat others: a long text takes a fraction of the time."""

from __future__ import annotations

__all__ = [
    "LayerResults",
    "first_layers_of_graph",
    "first_layers_of_openvino",
    "first_layers_of_pytorch",
    "layer_results",
]

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir
    import torch

_KEY = "hdexport.layer_results"
"""Key of a graph's metadata: names of the values that the last traced layer and the later ones return, as JSON."""


@dataclass(frozen=True, kw_only=True)
class LayerResults:
    """Values that layers of a graph return.

    Attributes:
        traced: calls of layers up to the last one that was traced.
        last_traced: names of what that call returns.
        repeated: for each later call, names of what the call returns. All of these layers are copies of traced ones
            with other weights.
    """

    traced: int
    last_traced: tuple[str, ...]
    repeated: tuple[tuple[str, ...], ...]

    @property
    def calls(self) -> int:
        """Calls of layers in all."""
        return self.traced + len(self.repeated)

    def write(self, model: onnx_ir.Model) -> None:
        """Keep the names in a graph's metadata."""
        model.metadata_props[_KEY] = json.dumps(vars(self))


def layer_results(model: onnx_ir.Model) -> LayerResults | None:
    """The layer results in a graph's metadata; None where all layers differ, and for a bundle of an older version."""
    text = model.metadata_props.get(_KEY)
    if text is None:
        return None
    found = json.loads(text)
    return LayerResults(
        traced=found["traced"],
        last_traced=tuple(found["last_traced"]),
        repeated=tuple(map(tuple, found["repeated"])),
    )


def first_layers_of_graph(model: onnx_ir.Model, results: LayerResults) -> bool:
    """Leave the repeated layers out of a graph, in place: whoever reads what they return reads the last traced one's.

    Returns:
        Whether the graph has all values by their names; it is unchanged where it has not.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    values = {value.name: value for node in model.graph for value in node.outputs}
    pairs = _pairs(results)
    if not all(name in values for pair in pairs for name in pair):
        return False
    for name, of_traced in pairs:
        value, kept = values[name], values[of_traced]
        if value.is_graph_output():
            copy = ir.node("Identity", [kept])
            copied = copy.outputs[0]
            copied.name, copied.type, copied.shape = value.name, value.type, value.shape
            value.name = f"{value.name}.left_out"
            model.graph.append(copy)
            model.graph.outputs[list(model.graph.outputs).index(value)] = copied
        value.replace_all_uses_with(kept)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return True


def first_layers_of_openvino(model: Any, results: LayerResults) -> bool:
    """Do to an ``openvino.Model`` what `first_layers_of_graph` does to a graph."""
    values = {name: value for node in model.get_ops() for value in node.outputs() for name in value.get_names()}
    pairs = _pairs(results)
    if not all(name in values for pair in pairs for name in pair):
        return False
    for name, of_traced in pairs:
        for reader in list(values[name].get_target_inputs()):
            reader.replace_source_output(values[of_traced])
    model.validate_nodes_and_infer_types()
    return True


def _pairs(results: LayerResults) -> list[tuple[str, str]]:
    """Each value of a repeated layer, and the last traced layer's that takes its place."""
    return [
        (name, of_traced)
        for names in results.repeated
        for name, of_traced in zip(names, results.last_traced, strict=True)
        if name != of_traced
    ]


@contextlib.contextmanager
def first_layers_of_pytorch(module: torch.nn.Module, traced: int | None) -> Iterator[Callable[[], int]]:
    """While this holds, calls of a model's layers after the first `traced` return what that one returned.

    Args:
        module: one call of it calls the layers.
        traced: calls that compute; None for all.

    Returns:
        A function that says how many calls there were.
    """
    from hdexport.graph.layer_calls import intercepted_layers, layers_of

    calls = _Calls(traced)
    with intercepted_layers(layers_of(module), calls.call):
        yield lambda: calls.number


class _Calls:
    """Counts the calls of layers, and answers those after the last traced one with its answer."""

    def __init__(self, traced: int | None) -> None:
        self.number = 0
        self._traced = traced
        self._last: Any = None

    def call(self, _: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        if self._traced is None or self.number <= self._traced:
            self._last = forward(*args, **kwargs)
        return self._last
