"""Trace equal layers once, and copy the traced layer in the graph: tracing takes most of the time of an export."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from hdruntime.errors import ExportError

logger = logging.getLogger(__name__)

DOMAIN = "hdexport.layers"
"""Domain of the marker nodes, which tracing puts into a graph and `CopyDuplicateLayers` removes."""

INPUTS = "Inputs"
"""Marker of the inputs of a traced layer: as many outputs as inputs."""

OUTPUTS = "Outputs"
"""Marker of the outputs of a traced layer. Its inputs are the layer's outputs and weights, its outputs are the layer's
outputs."""

DUPLICATE = "Duplicate"
"""Marker of a layer that is not traced: from the layer's inputs and weights to its outputs."""

TRACED = "traced"
"""Attribute of the three markers: number of the traced layer."""

_LAYER_NUMBERS = ("layer_id", "layer_idx")
"""Attributes by which a layer finds its part of a cache of keys and values, which encoders do not have."""

_WEIGHTS = ("_parameters", "_buffers")
"""Attributes of a module whose values may differ, since each copy of a layer has its own weights."""


@contextlib.contextmanager
def deduplicated_layers(module: torch.nn.Module) -> Iterator[None]:
    """Inside this context, an export traces only the first of a module's equal layers that get equal arguments.

    The other layers leave `DUPLICATE` markers in the graph for `CopyDuplicateLayers`. Layers are the members of module
    lists. They are equal if all their parts are equal, except for the values of parameters and buffers. A layer inside
    another layer belongs to the outer layer.
    """
    lists = [child for child in module.modules() if isinstance(child, torch.nn.ModuleList)]
    layers: list[Any] = list(dict.fromkeys(layer for children in lists for layer in children))
    tracer = _Tracer({layer: _describe_layer(layer) for layer in layers})  # all, before the first layer is changed
    originals = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(tracer.call, layer, layer.forward)
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            del layer.forward
            if original is not None:
                layer.forward = original


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Traced(NamedTuple):
    """A traced layer.

    Attributes:
        number: the number of the layer's markers.
        arguments: positional and keyword arguments.
        results: what the layer returned: a tensor, or tensors in tuples, lists and dictionaries.
    """

    number: int
    description: Hashable
    arguments: _Arguments
    results: Any

    def is_duplicated_by(self, description: Hashable, arguments: _Arguments) -> bool:
        """Whether a layer of that description would be traced to equal nodes."""
        # Described again: tracing a layer may prove that sizes with two names are equal.
        return self.description == description and _describe(self.arguments) == _describe(arguments)


class _Tracer:
    """Takes the calls of the layers during one export."""

    def __init__(self, descriptions: Mapping[torch.nn.Module, Hashable]) -> None:
        self._descriptions = descriptions
        self._traced: list[_Traced] = []
        self._is_inside = False

    def call(self, layer: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        is_exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if self._is_inside or not is_exporting:
            return forward(*args, **kwargs)
        self._is_inside = True
        try:
            return self._trace(layer, forward, (args, kwargs))
        finally:
            self._is_inside = False

    def _trace(self, layer: torch.nn.Module, forward: Any, arguments: _Arguments) -> Any:
        description = self._descriptions[layer]
        for traced in self._traced:
            if traced.is_duplicated_by(description, arguments):
                return _finish(DUPLICATE, traced, layer, _tensors(arguments))
        tensors = _tensors(arguments)
        marked = _with_tensors(arguments, _mark(INPUTS, len(self._traced), tensors, like=tensors))
        results = forward(*marked[0], **marked[1])
        traced = _Traced(number=len(self._traced), description=description, arguments=arguments, results=results)
        self._traced.append(traced)
        return _finish(OUTPUTS, traced, layer, _tensors(results))


def _finish(kind: str, traced: _Traced, layer: torch.nn.Module, inputs: list[torch.Tensor]) -> Any:
    """Mark the end of a layer; the layer's weights are inputs of the marker, which finds them under any names."""
    outputs = _mark(kind, traced.number, [*inputs, *_weights(layer)], like=_tensors(traced.results))
    return _with_tensors(traced.results, outputs)


def _mark(
    kind: str, number: int, inputs: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{kind}",
        inputs,
        attrs={TRACED: number},
        dtypes=[tensor.dtype for tensor in like],
        shapes=[tensor.shape for tensor in like],
        version=1,
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return []


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with other tensors in place of those of `_tensors`."""
    replacements = iter(tensors)

    def replaced(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(replacements)
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(replaced, part))
        if isinstance(part, (tuple, list)):
            return type(part)(map(replaced, part))
        if isinstance(part, dict):
            # Also transformers' ModelOutput, a dictionary that takes its fields by keyword.
            return type(part)(**{name: replaced(each) for name, each in part.items()})
        return part

    return replaced(value)


def _describe_layer(layer: torch.nn.Module) -> Hashable:
    """A layer's description, and which of its weights are tied: the graph has one value of tied weights."""
    seen: dict[int, int] = {}
    ties = tuple(seen.setdefault(id(weight), len(seen)) for weight in _weights(layer))
    return _describe(layer), ties


def _weights(layer: torch.nn.Module) -> list[torch.Tensor]:
    named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return [weight for _, weight in named]


def _describe(value: object, *, are_weights: bool = True) -> Hashable:
    """All that decides a layer's computation, or its use of an argument, except the values of its weights.

    An object that is neither a module nor plain data is equal only to itself, and so are tensors that a module holds
    without them being parameters or buffers. An object whose attribute `differs_by_layer` is true differs for each
    layer.
    """
    if isinstance(value, torch.Tensor) and are_weights:
        # Sizes by name: comparing two symbols would freeze them.
        return "tensor", value.dtype, str(value.shape)
    if isinstance(value, torch.nn.Module):
        state = {name: part for name, part in vars(value).items() if name not in _LAYER_NUMBERS}
        parts = ((name, _describe(part, are_weights=name in _WEIGHTS)) for name, part in state.items())
        return type(value), *parts
    if isinstance(value, dict):
        return type(value), *((name, _describe(part, are_weights=are_weights)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *(_describe(part, are_weights=are_weights) for part in value)
    if isinstance(value, set):
        return frozenset(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    return object() if getattr(value, "differs_by_layer", False) else id(value)


class CopyDuplicateLayers(ir.passes.InPlacePass):
    """Replace the markers of `deduplicated_layers`.

    1. A `DUPLICATE` marker becomes a copy of the traced layer's nodes that depend on the layer's inputs or weights,
       with the duplicate's inputs and weights; the other nodes are shared. An ExportError says that the duplicate has
       another number of inputs, outputs or weights.
    2. `INPUTS` and `OUTPUTS` markers are removed.

    Attributes:
        copies: number of copied layers.
    """

    def __init__(self) -> None:
        self.copies = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = list(model.graph)
        markers = [(index, node) for index, node in enumerate(nodes) if node.domain == DOMAIN]
        starts = {_number(node): index for index, node in markers if node.op_type == INPUTS}
        ends = {_number(node): index for index, node in markers if node.op_type == OUTPUTS}
        duplicates = [node for _, node in markers if node.op_type == DUPLICATE]
        for duplicate in duplicates:  # 1
            start, end = starts[_number(duplicate)], ends[_number(duplicate)]
            _copy_layer(duplicate, nodes[start], nodes[start + 1 : end], nodes[end])
        for index in (*starts.values(), *ends.values()):  # 2
            _replace(nodes[index], nodes[index].inputs[: len(nodes[index].outputs)])
        self.copies = len(duplicates)
        if self.copies:
            logger.info("%d layers are copies of a traced layer", self.copies)
        return ir.passes.PassResult(model, modified=bool(markers))


def _number(marker: ir.Node) -> int:
    return int(marker.attributes[TRACED].as_int())


def _copy_layer(duplicate: ir.Node, start: ir.Node, body: Sequence[ir.Node], end: ir.Node) -> None:
    results, weights = end.inputs[: len(end.outputs)], end.inputs[len(end.outputs) :]
    replaced = (*start.outputs, *weights)
    if len(duplicate.inputs) != len(replaced) or len(duplicate.outputs) != len(results):
        raise ExportError(
            "A layer has other inputs, outputs or weights than the layer that it duplicates.",
            hint="Please report the model and the versions that `hdexport doctor` prints.",
        )
    values = dict(zip(replaced, duplicate.inputs, strict=True))
    for node in body:
        if any(value in values for value in node.inputs):
            copy = _copy(node, values)
            values.update(zip(node.outputs, copy.outputs, strict=True))
            duplicate.graph.insert_before(duplicate, copy)
    _replace(duplicate, [values.get(result, result) for result in results])


def _copy(node: ir.Node, values: dict[ir.Value, ir.Value]) -> ir.Node:
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else values.get(value, value) for value in node.inputs],
        node.attributes,
        overload=node.overload,
        version=node.version,
        num_outputs=len(node.outputs),
    )
    for value, original in zip(copy.outputs, node.outputs, strict=True):
        value.type, value.shape = original.type, original.shape
    return copy


def _replace(marker: ir.Node, values: Sequence[ir.Value]) -> None:
    for output, value in zip(marker.outputs, values, strict=True):
        if output.is_graph_output():
            value.name = output.name
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    marker.graph.remove(marker, safe=True)
