"""The results of sparse-similarity in a batch job: the ids of tokens, and their weights."""

from __future__ import annotations

__all__ = ["sparse_similarity"]

import pyarrow as pa

from hdruntime.bundle.reader import Bundle
from hdruntime.jobs.rows import Row
from hdruntime.jobs.task_results import Outputs, Pairs, ResultOptions, TaskResults, Values
from hdruntime.text.sparse import SPARSE_EMBEDDING, most_active_dims, pooling_of_pieces, sparse_vector
from hdruntime.text.tokenization import Encoding


def sparse_similarity(bundle: Bundle, options: ResultOptions) -> TaskResults:
    """The columns ``indices`` and ``values`` of a sparse vector."""
    limit = most_active_dims(bundle.manifest, options.max_active_dims)

    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        vector = sparse_vector(outputs[SPARSE_EMBEDDING], max_active_dims=limit)
        return {"indices": vector.indices, "values": vector.values}

    columns = {"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())}
    return TaskResults(
        outputs=(SPARSE_EMBEDDING,),
        pairs=Pairs.REFUSED,
        fields=tuple(pa.schema(columns)),
        values=values,
        split_pooling=pooling_of_pieces(bundle.manifest),
        streams=False,
        prompts=True,
    )
