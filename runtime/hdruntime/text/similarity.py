"""Similarity of embeddings, by the four functions of sentence-transformers."""

from __future__ import annotations

__all__ = ["similarities", "similarities_of_pairs"]

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.errors import InputError
from hdruntime.optional import require
from hdruntime.text.embeddings import normalized

FloatArray = npt.NDArray[np.float32]


def similarities(function: str, first: object, second: object) -> Any:
    """The similarity of every pair of embeddings.

    Args:
        function: ``cosine``, ``dot``, or ``euclidean`` or ``manhattan``, whose distances are negated.
        first: [n, dimensions], or one embedding: [dimensions]; arrays, PyTorch tensors, or lists of them.
        second: [m, dimensions], or one embedding: [dimensions].

    Returns:
        float32 [n, m]; a tensor on the same device if an input is a tensor.

    Raises:
        InputError: the function is unknown.
    """
    of_each, _ = _functions(function)
    return _like(first, second, of_each(np.atleast_2d(_array(first)), np.atleast_2d(_array(second))))


def similarities_of_pairs(function: str, first: object, second: object) -> Any:
    """The similarity of embeddings with the same index.

    Args:
        function: as above.
        first, second: [n, dimensions], or one embedding each: [dimensions].

    Returns:
        float32 [n], or of single embeddings []; a tensor as above.

    Raises:
        InputError: the function is unknown.
    """
    _, of_pair = _functions(function)
    return _like(first, second, np.asarray(of_pair(_array(first), _array(second))))


Similarity = Callable[[FloatArray, FloatArray], Any]


def _functions(name: str) -> tuple[Similarity, Similarity]:
    try:
        return _FUNCTIONS[name]
    except KeyError:
        valid = ", ".join(map(repr, _FUNCTIONS))
        raise InputError(f"similarity_fn_name is {name!r}; it must be one of {valid}.") from None


def _rows(of_pair: Similarity) -> Similarity:
    """The function for every pair, row by row: all differences at once would fill the memory."""

    def of_each(first: FloatArray, second: FloatArray) -> FloatArray:
        return np.array([of_pair(row, second) for row in first], np.float32).reshape(len(first), len(second))

    return of_each


def _euclidean(first: FloatArray, second: FloatArray) -> Any:
    return -np.linalg.norm(first - second, axis=-1)


def _manhattan(first: FloatArray, second: FloatArray) -> Any:
    return -np.abs(first - second).sum(axis=-1)


_FUNCTIONS: dict[str, tuple[Similarity, Similarity]] = {
    "cosine": (lambda a, b: normalized(a) @ normalized(b).T, lambda a, b: (normalized(a) * normalized(b)).sum(axis=-1)),
    "dot": (lambda a, b: a @ b.T, lambda a, b: (a * b).sum(axis=-1)),
    "euclidean": (_rows(_euclidean), _euclidean),
    "manhattan": (_rows(_manhattan), _manhattan),
}
"""Name -> its functions for every pair, and for embeddings with the same index."""


def _tensor(value: object) -> Any:
    """The value, or the first of a list, if it is a PyTorch tensor; else None."""
    first = value[0] if isinstance(value, Sequence) and value else value
    return first if hasattr(first, "detach") else None


def _array(value: Any) -> FloatArray:
    if isinstance(value, Sequence) and _tensor(value) is not None:
        value = [_array(item) for item in value]
    elif hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value, np.float32)


def _like(first: object, second: object, result: FloatArray) -> Any:
    tensor = next((each for each in map(_tensor, (first, second)) if each is not None), None)
    return result if tensor is None else require("torch").from_numpy(result).to(tensor.device)
