"""A job's vectors before they are written: truncated, normalised, converted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hdruntime.errors import InputError, Setting
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import ErrorKind
from hdruntime.jobs.shards import FirstFailure, ShardResult
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized, truncated

COLUMN = "embedding"

_NORMALIZE_OR_FLOAT32 = (Setting("normalize", True), ", or use float32.")

Ranges = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """How vectors are written.

    Attributes:
        truncate_dim: number of leading dimensions that are kept; None for the model's default, mostly all.
        normalize: scale them to length 1, after truncation.
        output_dtype: type of their values, converted last.
        ranges: file with the calibration ranges of int8 and uint8, see `hdruntime.text.ranges.read_ranges`; None: each
            dimension's range in the first shard with vectors.
    """

    truncate_dim: int | None = None
    normalize: bool = False
    output_dtype: EmbeddingPrecision = EmbeddingPrecision.FLOAT32
    ranges: Path | None = None

    @property
    def is_default(self) -> bool:
        """Whether vectors are written unchanged."""
        return self == VectorOptions()

    def field(self, field: pa.Field) -> pa.Field:
        """The output column for a column of vectors.

        Raises:
            InputError: the vectors have fewer dimensions.
        """
        if is_of_tokens(field):
            of_token = self.field(field.with_type(field.type.value_type))
            return pa.field(field.name, pa.list_(of_token.type))
        # Without a fixed width in the graph, only rows show whether it is large enough.
        width = field.type.list_size if pa.types.is_fixed_size_list(field.type) else -1
        if width > 0:
            sample = truncated(np.zeros((2, width), np.float32), self.truncate_dim)
            width = quantized(sample, self.output_dtype).shape[-1]
        kind = quantized(np.zeros((2, 8), np.float32), self.output_dtype).dtype
        return pa.field(field.name, pa.list_(pa.from_numpy_dtype(kind), width))


def is_of_tokens(field: pa.Field) -> bool:
    """Whether a column of vectors has several of a text, one per token."""
    return pa.types.is_list(field.type) and pa.types.is_fixed_size_list(field.type.value_type)


class Vectors:
    """Finishes the vectors of shards, in order.

    Args:
        ranges: [2, dimensions], minimum and maximum per dimension, if they were given or rows were done before; None
            computes them, if the type needs ranges, from the first shard with vectors.
        chunked: whether a row of the input has several vectors, one per chunk.
    """

    def __init__(self, options: VectorOptions, ranges: Ranges | None, *, chunked: bool = False) -> None:
        self.ranges = ranges
        self._options = options
        self._chunked = chunked

    def finish(self, result: ShardResult) -> ShardResult:
        """A shard's results with vectors in their final form; InputError if the first has too few rows for ranges."""
        if self._options.is_default:
            return result
        results: list[dict[str, Any]] = [dict(row) for row in result.results]
        rows = [row for row in results if row[COLUMN] is not None]
        if not rows:
            return result
        # A text has one vector, [dimensions], or one per token, [tokens, dimensions].
        of_tokens = rows[0][COLUMN].ndim == 2
        vectors = [row[COLUMN] for row in rows]
        sizes = np.array([len(each) if of_tokens else 1 for each in vectors])
        matrix = truncated(np.concatenate(vectors) if of_tokens else np.stack(vectors), self._options.truncate_dim)
        if self._options.normalize:
            matrix = normalized(matrix)
        counts, first_failure = result.counts, result.first_failure
        if self._options.output_dtype is EmbeddingPrecision.FLOAT16:
            small = np.abs(matrix).max(axis=1) <= np.finfo(np.float16).max
            fits = np.array([each.all() for each in _parts(small, sizes)])
            failed = [row for row, is_one in zip(rows, fits, strict=True) if not is_one]
            rows = [row for row, is_one in zip(rows, fits, strict=True) if is_one]
            matrix, sizes = matrix[np.repeat(fits, sizes)], sizes[fits]
            numbers = itertools.accumulate(not (self._chunked and row["chunk"]) for row in results)
            of_input = {id(row): number for row, number in zip(results, numbers, strict=True)}
            counts += _too_large(failed, inputs=len({of_input[id(row)] for row in failed}))
            if failed and first_failure is None:
                name = "a row without an id" if failed[0]["id"] is None else f"row {failed[0]['id']}"
                first_failure = FirstFailure(name, failed[0]["error"])
        finished = quantized(matrix, self._options.output_dtype, self._ranges(matrix))
        for row, of_row in zip(rows, _parts(finished, sizes), strict=True):
            row[COLUMN] = of_row if of_tokens else of_row[0]
        return ShardResult(results=results, counts=counts, first_failure=first_failure)

    def _ranges(self, matrix: npt.NDArray[Any]) -> Ranges | None:
        if self.ranges is None and self._options.output_dtype.needs_ranges:
            if len(matrix) < 2:
                raise InputError(
                    Setting("output_dtype", self._options.output_dtype),
                    " takes each dimension's range from the job's first shard of rows, which has a single vector.",
                    hint=(
                        *("Pass the ranges of other vectors of the model as ", Setting("ranges"), ", or use "),
                        *(Setting("output_dtype", EmbeddingPrecision.FLOAT16), " or binary."),
                    ),
                )
            self.ranges = np.stack([matrix.min(axis=0), matrix.max(axis=0)]).astype(np.float32)
        return self.ranges


def _parts(joined: npt.NDArray[Any], sizes: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Joined lists of so many entries each, apart again."""
    return [joined[end - size : end] for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True)]


def _too_large(rows: list[dict[str, Any]], *, inputs: int) -> RowCounts:
    """Mark results as failed whose vectors float16 cannot hold; the change of the counts, for rows of the input."""
    for row in rows:
        row |= {
            COLUMN: None,
            "error": ("The embedding has a value that is too large for float16.\nAdd ", *_NORMALIZE_OR_FLOAT32),
        }
    if not rows:
        return RowCounts()
    return RowCounts(tokens=-sum(row["tokens"] for row in rows), errors={ErrorKind.INPUT.value: inputs})
