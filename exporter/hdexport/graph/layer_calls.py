"""The calls of a model's layers, intercepted, for code that traces layers once or leaves layers out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


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
