"""Similarity of embeddings, by the functions of sentence-transformers: four of vectors, and MaxSim of lists of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.errors import InputError
from hdruntime.optional import require
from hdruntime.text.checks import plain_name
from hdruntime.text.embeddings import normalized

_SCORE_OF_NOTHING = -1e9
"""MaxSim with a document that has no vector; sentence-transformers' value."""

_MAX_PRODUCTS = 2**24
"""Products of vectors that are made at a time, 64 MB."""

_MAX_QUERY_VECTORS = 2**12
"""Most vectors of several queries together, and of several documents."""


def similarities(function: str, first: object, second: object) -> Any:
    """The similarity of every pair of embeddings.

    Args:
        function: ``cosine``, ``dot``, or ``euclidean`` or ``manhattan``, whose distances are negated; others are
            rejected.
        first: [n, dimensions], or one embedding: [dimensions]; arrays, PyTorch tensors, or lists of them.
        second: [m, dimensions], or one embedding: [dimensions].

    Returns:
        float32 [n, m]; a tensor on the same device if an input is a tensor.
    """
    of_each, _ = _functions(function)
    return _like(first, second, of_each(np.atleast_2d(_array(first)), np.atleast_2d(_array(second))))


def similarities_of_pairs(function: str, first: object, second: object) -> Any:
    """The similarity of embeddings with the same index, as :func:`similarities`: float32 [n], or [] of single ones."""
    _, of_pair = _functions(function)
    return _like(first, second, np.asarray(of_pair(_array(first), _array(second))))


def maxsim(queries: object, documents: object, *, mean: bool = False) -> Any:
    """MaxSim of each query with each document: for each vector of the query its largest dot product, added up.

    Args:
        queries: [n], each float [query tokens, dimensions], arrays or PyTorch tensors; [n, query tokens, dimensions],
            where rows of zeros are padding; or one query: [query tokens, dimensions].
        documents: [m], each float [document tokens, dimensions], and the other forms.
        mean: divide by the vectors of the query.

    Returns:
        float32 [n, m]; a tensor on the same device if an input is a tensor. A query without vectors has 0, and a
        document without vectors -1e9.
    """
    query_arrays, document_arrays = _token_embeddings(queries, "queries"), _token_embeddings(documents, "documents")
    _check_dimensions([*query_arrays, *document_arrays])
    scores = np.empty((len(query_arrays), len(document_arrays)), np.float32)
    for rows in _blocks(query_arrays, _MAX_QUERY_VECTORS):
        block = [query_arrays[index] for index in rows]
        for columns in _blocks(document_arrays, sum(map(len, block))):
            scores[np.ix_(rows, columns)] = _maxsim(block, [document_arrays[index] for index in columns])
    return _like(queries, documents, _per_vector(scores.T, query_arrays).T if mean else scores)


def maxsim_of_pairs(queries: object, documents: object, *, mean: bool = False) -> Any:
    """MaxSim of each query with the document of the same index, see :func:`maxsim`: float32 [n]."""
    query_arrays, document_arrays = _token_embeddings(queries, "queries"), _token_embeddings(documents, "documents")
    if len(query_arrays) != len(document_arrays):
        raise InputError(
            f"There are {len(query_arrays)} queries but {len(document_arrays)} documents; pass one document per query."
        )
    _check_dimensions([*query_arrays, *document_arrays])
    pairs = zip(query_arrays, document_arrays, strict=True)
    scores = np.array([_maxsim([query], [document])[0, 0] for query, document in pairs], np.float32)
    return _like(queries, documents, _per_vector(scores, query_arrays) if mean else scores)


def _maxsim(queries: Sequence[FloatArray], documents: Sequence[FloatArray]) -> FloatArray:
    """float32 [queries, documents]."""
    scores = np.full((len(queries), len(documents)), _SCORE_OF_NOTHING, np.float32)
    rows, columns = ([index for index, array in enumerate(arrays) if len(array)] for arrays in (queries, documents))
    scores[np.ix_([index for index, query in enumerate(queries) if not len(query)], columns)] = 0
    if not rows or not columns:
        return scores
    queries, documents = [queries[index] for index in rows], [documents[index] for index in columns]
    products = np.concatenate(queries) @ np.concatenate(documents).T
    largest = np.maximum.reduceat(products, _starts(documents), axis=1)
    scores[np.ix_(rows, columns)] = np.add.reduceat(largest, _starts(queries), axis=0)
    return scores


def _starts(texts: Sequence[FloatArray]) -> list[int]:
    return [0, *itertools.accumulate(len(each) for each in texts[:-1])]


def _per_vector(scores: FloatArray, queries: Sequence[FloatArray]) -> FloatArray:
    """Scores [..., queries], each divided by the query's vectors."""
    counts = np.array([max(1, len(each)) for each in queries], np.float32)
    return np.divide(scores, counts, dtype=np.float32)


def _blocks(texts: Sequence[FloatArray], products_per_vector: int) -> Iterator[list[int]]:
    """Indices of texts in blocks, which limit the number of dot products."""
    block: list[int] = []
    vectors = 0
    for index, text in enumerate(texts):
        if block and (vectors + len(text)) * max(1, products_per_vector) > _MAX_PRODUCTS:
            yield block
            block, vectors = [], 0
        block.append(index)
        vectors += len(text)
    if block:
        yield block


def _token_embeddings(value: Any, name: str) -> list[FloatArray]:
    """[texts], each float32 [tokens, dimensions]."""
    if isinstance(value, Sequence):
        texts = [_array(each) for each in value]
    else:
        whole = _array(value)
        texts = [whole] if whole.ndim == 2 else [each[each.any(axis=1)] for each in whole] if whole.ndim == 3 else []
        if whole.ndim not in (2, 3):
            raise InputError(f"{name} has shape {list(whole.shape)}; {_SHAPES}")
    for index, text in enumerate(texts):
        if text.ndim != 2:
            raise InputError(f"{name}[{index}] has shape {list(text.shape)}; {_SHAPES}")
    return texts


_SHAPES = "each text's vectors must be [tokens, dimensions], as MultiVectorEncoder gives them."


def _check_dimensions(texts: Sequence[FloatArray]) -> None:
    dimensions = sorted({text.shape[1] for text in texts if len(text)})
    if len(dimensions) > 1:
        raise InputError(
            f"Vectors have {' and '.join(map(str, dimensions))} dimensions; MaxSim needs vectors of equal dimensions.",
            hint="Encode all texts with one model and with the same truncate_dim.",
        )


Similarity = Callable[[FloatArray, FloatArray], Any]


def _functions(name: str) -> tuple[Similarity, Similarity]:
    name = plain_name(name)
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
        value = value.detach().to_dense().cpu().float().numpy()
    return np.asarray(value, np.float32)


def _like(first: object, second: object, result: FloatArray) -> Any:
    tensor = next((each for each in map(_tensor, (first, second)) if each is not None), None)
    return result if tensor is None else require("torch").from_numpy(result).to(tensor.device)
