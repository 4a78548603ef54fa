"""A model and its graphs without the layers that repeat others: a long text takes a fraction of the time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import onnx_ir
    import torch

_KEY = "hdexport.layer_results"
"""Key of a graph's metadata: names of the values that layers return, and which layers repeat others, as JSON."""


class LayerResults(NamedTuple):
    """Values that layers of a graph return.

    Attributes:
        names: of each call of a layer, in order, the names of the values that the call returns.
        repeated: numbers of the calls, from 0, of layers that are copies of traced ones with other weights.
    """

    names: tuple[tuple[str, ...], ...]
    repeated: tuple[int, ...]

    def write(self, model: onnx_ir.Model) -> None:
        """Keep the names in a graph's metadata."""
        model.metadata_props[_KEY] = json.dumps(self._asdict())

    @property
    def replacements(self) -> list[tuple[str, str]]:
        """Each value of a repeated layer, and the value of the call before that takes its place, in order.

        That value may itself have been replaced by an earlier one.
        """
        return [
            (name, before)
            for number in self.repeated
            for name, before in zip(self.names[number], self.names[number - 1], strict=True)
            if name != before
        ]


def layer_results(model: onnx_ir.Model) -> LayerResults | None:
    """The layer results in a graph's metadata; None where all layers differ, and for a bundle of an older version."""
    text = model.metadata_props.get(_KEY)
    if text is None:
        return None
    found = json.loads(text)
    return LayerResults(names=tuple(map(tuple, found["names"])), repeated=tuple(found["repeated"]))


def leave_layers_out_of_graph(model: onnx_ir.Model, results: LayerResults) -> bool:
    """Leave the repeated layers out of a graph, in place: each returns the result of the layer before it.

    Returns whether the graph has all values by their names; a graph that has not is unchanged.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    values = {value.name: value for node in model.graph for value in node.outputs}
    if not all(name in values for pair in results.replacements for name in pair):
        return False
    for name, before in results.replacements:
        value, kept = values[name], values[before]
        if value.is_graph_output():
            copy = ir.node("Identity", [kept])
            copied = copy.outputs[0]
            copied.name, copied.type, copied.shape = value.name, value.type, value.shape
            value.name = f"{value.name}.left_out"
            model.graph.append(copy)
            model.graph.outputs[list(model.graph.outputs).index(value)] = copied
        value.replace_all_uses_with(kept)
        values[name] = kept
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return True


@contextlib.contextmanager
def layers_left_out_of_pytorch(module: torch.nn.Module, repeated: Collection[int]) -> Iterator[Callable[[], int]]:
    """While this holds, the calls of a module's layers with these numbers, from 0, return the result of the call before
    them. Gives a function that says how many calls there were."""
    from hdexport.graph.repeated_layers import intercepted_layers, layers_of

    number, last = 0, None

    def answer(_: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal number, last
        if number not in repeated:
            last = forward(*args, **kwargs)
        number += 1
        return last

    with intercepted_layers(layers_of(module), answer):
        yield lambda: number
