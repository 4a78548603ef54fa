"""Sparse vectors of texts: a weight for some tokens of the vocabulary, for an inverted index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.task import Encoder, Outputs, TaskOptions, Text, TextTask, Values
from hdruntime.text.encoding import Encoding
from hdruntime.text.splitting import SUM, SplitPooling

if TYPE_CHECKING:
    import pyarrow as pa

_OUTPUT = "sparse_embedding"
"""[batch, vocab_size], float32, not negative."""


@dataclass(frozen=True, eq=False)
class SparseVector:
    """The values of a vector that are not 0.

    Attributes:
        indices: int32 [active], ascending: ids of tokens.
        values: float32 [active], their weights.
        dimensions: dimensions of the whole vector, the size of the vocabulary.
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


class SparseVectors(TextTask):
    """The sparse vector of a text, with `max_active_dims` values or, for None, as many as the model keeps."""

    name = Task.SPARSE_SIMILARITY
    reads_offsets = False
    encoder = Encoder("SparseEncoder", "SparseEncoder", "texts", "encode(texts)")
    job_options = ("max_active_dims",)
    streams = False
    prompts = True

    def __init__(self, manifest: Manifest, max_active_dims: int | None = None) -> None:
        super().__init__(manifest)
        self._limit = kept_active_dims(manifest, max_active_dims)
        # As the model combines its tokens' weights.
        own = manifest.sentence
        self.split_pooling = SUM if own is not None and own.pooling == ("sum",) else SplitPooling.MAX

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> SparseVectors:
        return cls(bundle.manifest, options.max_active_dims)

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        return tuple(pa.schema({"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())}))

    def values(self, answer: SparseVector) -> Values:
        return {"indices": answer.indices, "values": answer.values}

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> SparseVector:
        return sparse_vector(outputs[_OUTPUT], max_active_dims=self._limit)


TASK = SparseVectors


def kept_active_dims(manifest: Manifest, max_active_dims: int | None) -> int | None:
    """Number of values of a vector that are kept: the caller's number, or else the model's; None for all."""
    if max_active_dims is not None and max_active_dims < 1:
        raise InputError(
            parameter="max_active_dims", value=max_active_dims, accepted="1 or more, or None for all values"
        )
    settings = manifest.sentence
    return settings.max_active_dims if settings is not None and max_active_dims is None else max_active_dims


def sparse_vector(weights: FloatArray, *, max_active_dims: int | None = None) -> SparseVector:
    """The values of a dense vector, float32 [dimensions], that are not 0.

    Of more than `max_active_dims` the largest magnitudes are kept, as in sentence-transformers; of equal ones those of
    smaller ids.
    """
    # Of booleans, NumPy finds the places ten times faster than of floats.
    indices = np.flatnonzero(weights != 0)
    if max_active_dims is not None and len(indices) > max_active_dims:
        best = np.argsort(-np.abs(weights[indices]), kind="stable")[:max_active_dims]
        indices = np.sort(indices[best])
    return SparseVector(indices.astype(np.int32), weights[indices].astype(np.float32), len(weights))


def stacked(vectors: Sequence[SparseVector]) -> FloatArray:
    """float32 [vectors, dimensions], with their zeros; vectors of several sizes are rejected."""
    sizes = sorted({vector.dimensions for vector in vectors})
    if len(sizes) > 1:
        raise InputError(
            f"The sparse vectors have {' and '.join(map(str, sizes))} dimensions, so they are of several models.",
            hint="Give vectors of one model.",
        )
    return np.stack([vector.dense() for vector in vectors]) if vectors else np.zeros((0, 0), np.float32)
