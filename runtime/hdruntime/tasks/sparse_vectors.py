"""Sparse vectors of texts, by bundles of sparse-similarity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.bundle.manifest import Manifest
from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.text.sparse import SPARSE_EMBEDDING, SparseVector, most_active_dims, pooling_of_pieces, sparse_vector
from hdruntime.text.tokenization import Encoding

if TYPE_CHECKING:
    import pyarrow as pa


class SparseVectors(TextTask):
    """The sparse vector of a text.

    Args:
        manifest: of the bundle.
        max_active_dims: most values that are kept; None for the model's number.

    Raises:
        InputError: nothing would be kept.
    """

    outputs = (SPARSE_EMBEDDING,)
    streams = False
    prompts = True

    def __init__(self, manifest: Manifest, max_active_dims: int | None = None) -> None:
        super().__init__(manifest)
        self._limit = most_active_dims(manifest, max_active_dims)
        self.split_pooling = pooling_of_pieces(manifest)

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        return tuple(pa.schema({"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())}))

    def values(self, answer: SparseVector) -> Values:
        return {"indices": answer.indices, "values": answer.values}

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> SparseVector:
        return sparse_vector(outputs[SPARSE_EMBEDDING], max_active_dims=self._limit)
