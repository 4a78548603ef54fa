"""Embeddings truncated, normalised or quantised, equal to sentence-transformers."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from hdruntime.arrays import AnyArray, FloatingArray
from hdruntime.errors import InputError
from hdruntime.text.checks import checked_choice

_SMALLEST_NORM = np.float32(1e-12)
"""A shorter vector is not scaled to length 1; PyTorch's ``normalize`` has the same bound."""

_STEPS = 255
"""Steps of equal width from a dimension's minimum to its maximum, in int8 and uint8."""


class EmbeddingPrecision(StrEnum):
    """The type of an embedding's values; names as in sentence-transformers, which does not have float16."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    """One bit per dimension, 1 if the value is positive; eight bits in an int8, 128 less than in a uint8."""
    UBINARY = "ubinary"
    """One bit per dimension; eight bits in a uint8, the first dimension in the highest bit."""

    @property
    def needs_ranges(self) -> bool:
        """Whether values are steps between each dimension's minimum and maximum."""
        return self in (EmbeddingPrecision.INT8, EmbeddingPrecision.UINT8)


def truncated(embeddings: FloatingArray, dimensions: int | None) -> FloatingArray:
    """The first dimensions of embeddings, float [..., dimensions], for models with Matryoshka training: a view; None
    keeps all."""
    if dimensions is None:
        return embeddings
    if not 1 <= dimensions <= embeddings.shape[-1]:
        raise InputError(
            f"Embeddings cannot be truncated to {dimensions} dimensions; these have {embeddings.shape[-1]}.",
            hint=f"Choose 1 to {embeddings.shape[-1]}.",
        )
    return embeddings[..., :dimensions]


def normalized(embeddings: FloatingArray) -> FloatingArray:
    """Embeddings, float [..., dimensions], scaled to length 1; zeros stay zeros."""
    norms = np.linalg.norm(embeddings, axis=-1, keepdims=True)
    return embeddings / np.maximum(norms, _SMALLEST_NORM)


def quantized(
    embeddings: FloatingArray, precision: EmbeddingPrecision | str, ranges: FloatingArray | None = None
) -> AnyArray:
    """Embeddings in fewer bytes, equal to sentence-transformers' ``quantize_embeddings``.

    Args:
        embeddings: float [..., dimensions].
        precision: the type of the result; a value that float16 cannot hold is rejected.
        ranges: [2, dimensions], each dimension's minimum and maximum, for int8 and uint8; None computes them from
            `embeddings`, which must be several then. Values outside of the range are clipped.

    Returns:
        [..., dimensions]; for ``binary`` and ``ubinary`` [..., (dimensions + 7) // 8], the last byte padded with zero
        bits.
    """
    precision = checked_choice(EmbeddingPrecision, precision, option="precision")
    if precision.needs_ranges:
        steps = _steps(embeddings, _ranges(embeddings, precision, ranges))
        if precision is EmbeddingPrecision.UINT8:
            return steps.astype(np.uint8)
        return (steps - 128).astype(np.int8)
    if precision in (EmbeddingPrecision.BINARY, EmbeddingPrecision.UBINARY):
        bits = np.packbits(embeddings > 0, axis=-1)
        # The same bits but for the highest: a uint8 less 128, read as an int8.
        return bits if precision is EmbeddingPrecision.UBINARY else (bits ^ 0x80).view(np.int8)
    if precision is EmbeddingPrecision.FLOAT16:
        largest, limit = np.abs(embeddings).max(initial=0), np.finfo(np.float16).max
        if largest > limit:
            raise InputError(
                f"An embedding has a value of magnitude {largest:g}; float16 holds at most {limit:g}.",
                hint="Normalise the embeddings, or leave them in float32.",
            )
    return embeddings.astype(precision.value)


def _ranges(embeddings: FloatingArray, precision: EmbeddingPrecision, ranges: FloatingArray | None) -> FloatingArray:
    dimensions = embeddings.shape[-1]
    if ranges is not None:
        ranges = np.asarray(ranges)
        if ranges.shape != (2, dimensions):
            raise InputError(
                f"ranges has the shape {list(ranges.shape)}; it must be [2, {dimensions}]: each dimension's least and "
                "greatest value."
            )
        if not (np.isfinite(ranges).all() and (ranges[0] <= ranges[1]).all()):
            raise InputError(
                "ranges are not finite, or a minimum is larger than its maximum.",
                hint="The first row has each dimension's minimum, the second row its maximum.",
            )
        return ranges.astype(np.float32, copy=False)
    rows = embeddings.reshape(-1, dimensions)
    if len(rows) == 1:
        raise InputError(
            f"A single embedding has no ranges to quantise to {precision.value}.",
            hint="Quantise several at a time, or give `ranges`: each dimension's least and greatest value.",
        )
    if not len(rows):
        return np.zeros((2, dimensions), np.float32)
    return np.stack([rows.min(axis=0), rows.max(axis=0)]).astype(np.float32, copy=False)


def _steps(embeddings: FloatingArray, ranges: FloatingArray) -> FloatingArray:
    """[..., dimensions]: whole steps above each dimension's minimum, 0 to 255."""
    least, greatest = ranges
    width = (greatest - least) / _STEPS
    # A dimension with a single value has no width; its step is 0.
    width = np.where(width == 0, 1, width)
    return np.clip(np.floor((embeddings - least) / width), 0, _STEPS)
