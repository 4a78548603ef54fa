"""Layers that differ only in their weights are traced once: tracing takes most of the time of an export."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hdexport.graph.passes.repeat_layers import FIRST, INPUTS, LAYERS_DOMAIN, OUTPUTS, REPEAT

_NUMBERS_OF_LAYERS = ("layer_id", "layer_idx")
"""Attributes by which a layer finds its part of a cache of keys and values, of which encoders have none."""

_WEIGHTS = ("_parameters", "_buffers")
"""Attributes of a module; their values may differ, for each copy of a layer gets its own."""


@contextlib.contextmanager
def layers_traced_once(module: torch.nn.Module) -> Iterator[None]:
    """While this holds, an export traces only the first of a module's layers that are equal and equally called.

    The others leave a mark in the graph, for `hdexport.graph.passes.repeat_layers` to replace. Layers are the members
    of module lists; they are equal if all their parts are, except for the values of parameters and buffers.
    """
    layers = layers_of(module)
    tracer = _Tracer({layer: _describe_layer(layer) for layer in layers})  # of all of them before the first is changed
    with intercepted_layers(layers, tracer.call):
        yield


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Traced(NamedTuple):
    """A layer that was traced, the number that marks have for it, its arguments, and its results.

    Attributes:
        arguments: positional and keyword arguments.
        results: returned by the layer: a tensor, or tensors in tuples, lists and dictionaries.
    """

    number: int
    description: Hashable
    arguments: _Arguments
    results: Any

    def is_repeated_by(self, description: Hashable, arguments: _Arguments) -> bool:
        """Whether a call of a layer of that description would be traced to the same nodes."""
        # Described again: tracing a layer may prove that sizes with two names are the same.
        return self.description == description and _describe(self.arguments) == _describe(arguments)


class _Tracer:
    """Answers the calls of all layers, whose descriptions are given, during one export."""

    def __init__(self, descriptions: Mapping[torch.nn.Module, Hashable]) -> None:
        self._descriptions = descriptions
        self._traced: list[_Traced] = []

    def call(self, layer: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        arguments = (args, kwargs)
        description = self._descriptions[layer]
        for traced in self._traced:
            if traced.is_repeated_by(description, arguments):
                return _finish(REPEAT, traced, layer, _tensors(arguments))
        tensors = _tensors(arguments)
        marked = _with_tensors(arguments, _mark(INPUTS, len(self._traced), tensors, like=tensors))
        results = forward(*marked[0], **marked[1])
        traced = _Traced(number=len(self._traced), description=description, arguments=arguments, results=results)
        self._traced.append(traced)
        return _finish(OUTPUTS, traced, layer, _tensors(results))


def _finish(kind: str, traced: _Traced, layer: torch.nn.Module, inputs: list[torch.Tensor]) -> Any:
    """Mark the end of a layer; its weights go into the mark, which distinguishes them under any names."""
    outputs = _mark(kind, traced.number, [*inputs, *_weights(layer)], like=_tensors(traced.results))
    return _with_tensors(traced.results, outputs)


def _mark(
    kind: str, number: int, inputs: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    return torch.onnx.ops.symbolic_multi_out(
        f"{LAYERS_DOMAIN}::{kind}",
        inputs,
        attrs={FIRST: number},
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
    """The value, with other tensors in the places of `_tensors`."""
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
    """A layer's description, and which of its weights are tied: the graph has one value of them."""
    seen: dict[int, int] = {}
    ties = tuple(seen.setdefault(id(weight), len(seen)) for weight in _weights(layer))
    return _describe(layer), ties


def _weights(layer: torch.nn.Module) -> list[torch.Tensor]:
    named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return [weight for _, weight in named]


def _describe(value: object, *, are_weights: bool = True) -> Hashable:
    """All that decides a layer's computation, or its use of an argument, but the values of its weights.

    An object that is neither a module nor plain data is taken to be the same only if it is the very same object, and so
    are tensors that a module holds without them being parameters or buffers. An object whose attribute
    `differs_by_layer` is true is something else for each layer.
    """
    if isinstance(value, torch.Tensor) and are_weights:
        # Sizes by name: whether two symbols are equal is a question that would freeze them.
        return "tensor", value.dtype, str(value.shape)
    if isinstance(value, torch.nn.Module):
        state = {name: part for name, part in vars(value).items() if name not in _NUMBERS_OF_LAYERS}
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


def layers_of(module: torch.nn.Module) -> list[Any]:
    """The layers of a model: the members of its module lists, each once."""
    lists = [child for child in module.modules() if isinstance(child, torch.nn.ModuleList)]
    return list(dict.fromkeys(layer for children in lists for layer in children))


@contextlib.contextmanager
def intercepted_layers(layers: Sequence[Any], answer: Callable[..., Any]) -> Iterator[None]:
    """While this holds, `answer` is called in place of layers: with the layer, its own ``forward`` and the arguments of
    the call. Layers inside of a layer belong to that layer."""
    originals = [vars(layer).get("forward") for layer in layers]
    is_inside = False

    def called(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return forward(*args, **kwargs)
        is_inside = True
        try:
            return answer(layer, forward, *args, **kwargs)
        finally:
            is_inside = False

    for layer in layers:
        layer.forward = functools.partial(called, layer, layer.forward)
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            del layer.forward
            if original is not None:
                layer.forward = original
