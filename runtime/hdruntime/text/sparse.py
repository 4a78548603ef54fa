"""Sparse vectors: a weight for some tokens of a vocabulary, for an inverted index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.text.splitting import SUM, PiecePooling, SplitPooling

SPARSE_EMBEDDING = "sparse_embedding"
"""Output of the task sparse-similarity: [batch, vocab_size], float32, not negative."""


@dataclass(frozen=True, eq=False)
class SparseVector:
    """The values of a vector that are not 0.

    Attributes:
        indices: int32 [active], ascending: ids of tokens.
        values: float32 [active], their weights.
        dimensions: of the whole vector, the size of the vocabulary.
    """

    indices: npt.NDArray[np.int32]
    values: FloatArray
    dimensions: int

    def __len__(self) -> int:
        """The number of values that are not 0."""
        return len(self.indices)

    def dense(self) -> FloatArray:
        """float32 [dimensions], with its zeros."""
        whole = np.zeros(self.dimensions, np.float32)
        whole[self.indices] = self.values
        return whole


def most_active_dims(manifest: Manifest, asked: int | None) -> int | None:
    """How many values of a vector are kept: as many as are asked for, else the model's number; None for all.

    Raises:
        InputError: fewer than one is asked for.
    """
    if asked is not None and asked < 1:
        raise InputError(
            f"max_active_dims is {asked}, which keeps nothing of a vector.\nUse 1 or more, or None for all but zeros."
        )
    own = manifest.sentence
    return own.max_active_dims if own is not None and asked is None else asked


def pooling_of_pieces(manifest: Manifest) -> PiecePooling:
    """How the vectors of a text's pieces are combined: as the model combines its tokens' weights."""
    own = manifest.sentence
    return SUM if own is not None and own.pooling == ("sum",) else SplitPooling.MAX


def sparse_vector(weights: FloatArray, *, max_active_dims: int | None = None) -> SparseVector:
    """The values of a dense vector that are not 0.

    Args:
        weights: float32 [dimensions].
        max_active_dims: keeps so many of them, the largest magnitudes, as sentence-transformers does; of equal ones
            the ones with smaller ids. None keeps all.
    """
    indices = np.flatnonzero(weights)
    if max_active_dims is not None and len(indices) > max_active_dims:
        best = np.argsort(-np.abs(weights[indices]), kind="stable")[:max_active_dims]
        indices = np.sort(indices[best])
    return SparseVector(indices.astype(np.int32), weights[indices].astype(np.float32), len(weights))


def stacked(vectors: Sequence[SparseVector]) -> FloatArray:
    """float32 [vectors, dimensions], with their zeros.

    Raises:
        InputError: the vectors are not of one size.
    """
    sizes = sorted({vector.dimensions for vector in vectors})
    if len(sizes) > 1:
        raise InputError(
            f"The sparse vectors have {' and '.join(map(str, sizes))} dimensions, so they are of several models.\n"
            "Give vectors of one model."
        )
    return np.stack([vector.dense() for vector in vectors]) if vectors else np.zeros((0, 0), np.float32)
