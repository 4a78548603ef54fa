"""An attention operator's answers by its definition, worked out once for all comparisons, and those of its bodies."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
import torch

from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.attention_layers import Layer
from support.comparators import assert_as_accurate
from support.described_operators import BODIES
from support.function_bodies import new_session, run

_MOST_KEPT = 64
"""Answers: more than a test asks for by one node, and then again for the other order of blocks."""

_kept: OrderedDict[tuple[object, ...], np.ndarray] = OrderedDict()


def exact_answer(
    node: Layer, inputs: Mapping[str, np.ndarray], dtype: torch.dtype = torch.float64, **changes: Any
) -> np.ndarray:
    """The answer by the definition, computed in that dtype; `changes` are attributes and inputs.

    The same node with the same bytes is not asked again: a definition in float64 takes most of the time of a test.
    """
    if changes:
        return _by_definition(node, inputs, dtype, **changes)
    arrays = sorted(inputs.items())
    key = (node, dtype, *((name, array.dtype.str, array.shape, _digest(array)) for name, array in arrays))
    if key not in _kept:
        _kept[key] = _by_definition(node, inputs, dtype)
    _kept.move_to_end(key)
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return _kept[key].copy()


def error_of_pytorch(node: Layer, inputs: Mapping[str, np.ndarray]) -> float:
    """The largest error of the definition, computed in the node's dtype."""
    return float(np.abs(exact_answer(node, inputs, getattr(torch, node.dtype)) - exact_answer(node, inputs)).max())


def assert_as_accurate_as(error: float, node: Layer, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    """Fail if the answer of a node is less accurate than one of PyTorch's with that error."""
    exact = torch.from_numpy(exact_answer(node, inputs))
    assert_as_accurate(torch.from_numpy(got), exact, (exact + error).to(getattr(torch, node.dtype)))


@functools.cache
def _usual_error(node: Layer) -> float:
    return error_of_pytorch(node, BODIES[node.operator.name].usual(node))


def assert_right(node: Layer, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    """Fail if the answer of a described body is less accurate than PyTorch's, or not 0 where it is by definition."""
    described = BODIES[node.operator.name]
    # A few values are not enough to show the effect of rounding.
    errors = [_usual_error(node), *([error_of_pytorch(node, inputs)] if described.rounds_by_text else [])]
    assert_as_accurate_as(max(errors), node, got, inputs)
    assert (got[described.zero(inputs, got.shape[1])] == 0).all()


def answer_of_body(node: Layer, variant: BodyVariant, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The answer of a node's body in that order of blocks."""
    return run(_session_of(node, variant), inputs)


@functools.cache
def _session_of(node: Layer, variant: BodyVariant) -> onnxruntime.InferenceSession:
    return new_session(chain_of([node], variant))


def _by_definition(node: Layer, inputs: Mapping[str, np.ndarray], dtype: torch.dtype, **changes: Any) -> np.ndarray:
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    typed = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    answer = node.by_definition([typed[name] for name in node.operator.state_names], typed, **changes)
    return (answer.float() if answer.dtype == torch.bfloat16 else answer).numpy()  # NumPy has no bfloat16


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array)).digest()
