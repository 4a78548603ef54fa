"""Whether two arrays hold the same answer, by the tolerances that hdexport promises."""

from __future__ import annotations

__all__ = [
    "FLOAT32_ATOL",
    "FLOAT32_STEPS",
    "HALF_COSINE",
    "HALF_LENGTH",
    "NOT_FINITE",
    "Comparison",
    "compare",
    "joined",
]

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLOAT32_ATOL = 1e-4
"""Largest absolute difference of a float32 graph's outputs from PyTorch's."""

FLOAT32_STEPS = 2
"""Or, of values so large that it is more, by how many units in the last place of PyTorch's value they may differ.

From 1024 on, float32 has no two numbers within `FLOAT32_ATOL`; BigBird's question answering has scores of -1e6, which
are 0.06 apart.
"""

HALF_COSINE = 0.999
"""Smallest cosine, per token, of a half-precision graph's outputs with PyTorch's in float32."""

HALF_LENGTH = 0.05
"""Largest difference of such a vector's length, relative to PyTorch's, or absolute where that is below 1.

The cosine does not see a scale; a vector within `HALF_COSINE` is off by up to 0.045 of its length across it, so this
asks for no more along it.
"""


_SLICE_VALUES = 2**18
"""Values that are compared at once: float64 copies of a large output would take four times its memory."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison found.

    Attributes:
        max_abs_error: largest absolute difference; infinite where a value is not finite.
        min_cosine: smallest cosine over the vectors along the last axis; 1.0 where both are zero.
        passed: whether the tolerance holds.
        tolerance: the tolerance, in words.
    """

    max_abs_error: float
    min_cosine: float
    passed: bool
    tolerance: str


NOT_FINITE = Comparison(max_abs_error=float("inf"), min_cosine=-1.0, passed=False, tolerance="finite values")
"""What is found where a value is NaN or infinite."""


def compare(
    actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating], *, half_precision: bool
) -> Comparison:
    """Compare one output's real values, in slices: the memory for it does not grow with the output.

    Args:
        actual: [..., features], what a graph gave.
        expected: the same shape, what PyTorch gives in float32.
        half_precision: compare directions and lengths of vectors, and not values.

    Raises:
        ValueError: the shapes differ; that is a mistake of the caller, not an inexact result.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"The shapes {actual.shape} and {expected.shape} differ.")
    features = actual.shape[-1]
    got, want = actual.reshape(-1, features), expected.reshape(-1, features)
    rows = max(1, _SLICE_VALUES // max(1, features))
    compare_slice = _compare_half if half_precision else _compare_float32
    return joined([
        compare_slice(got[first : first + rows].astype(np.float64), want[first : first + rows].astype(np.float64))
        for first in range(0, max(1, len(got)), rows)
    ])  # fmt: skip


def joined(parts: Sequence[Comparison]) -> Comparison:
    """One comparison of what several found about parts of the same output; at least one."""
    not_finite = [part for part in parts if part.max_abs_error == float("inf")]
    return Comparison(
        max_abs_error=max(part.max_abs_error for part in parts),
        min_cosine=min(part.min_cosine for part in parts),
        passed=all(part.passed for part in parts),
        # The tolerance that says most: values that are not finite, or the longest, which names large values.
        tolerance=max((part.tolerance for part in not_finite or parts), key=len),
    )


FloatArray = npt.NDArray[np.float64]


def _compare_float32(got: FloatArray, want: FloatArray) -> Comparison:
    """Of [rows, features]: every value holds the tolerance."""
    if not _finite(got, want):
        return NOT_FINITE
    steps = FLOAT32_STEPS * np.spacing(np.abs(want).astype(np.float32))
    errors = np.abs(got - want)
    has_coarse_values = bool((steps > FLOAT32_ATOL).any())
    return Comparison(
        max_abs_error=float(errors.max(initial=0.0)),
        min_cosine=_min_cosine(got, want),
        passed=bool((errors <= np.maximum(steps, FLOAT32_ATOL)).all()),
        tolerance=f"max abs error <= {FLOAT32_ATOL:g}"
        + (f", or {FLOAT32_STEPS} units in the last place of large values" if has_coarse_values else ""),
    )


def _compare_half(got: FloatArray, want: FloatArray) -> Comparison:
    """Of [rows, features]: every vector holds the tolerances of its direction and its length."""
    if not _finite(got, want):
        return NOT_FINITE
    cosine = _min_cosine(got, want)
    # One feature, a reranker's score, has a sign and no direction: its length is all there is to compare.
    is_score = got.shape[-1] == 1
    length_error = _max_length_error(got, want)
    return Comparison(
        max_abs_error=float(np.abs(got - want).max(initial=0.0)),
        min_cosine=cosine,
        passed=(is_score or cosine >= HALF_COSINE) and length_error <= HALF_LENGTH,
        tolerance=f"cosine >= {HALF_COSINE:g}, length within {HALF_LENGTH:.0%}",
    )


def _finite(got: FloatArray, want: FloatArray) -> bool:
    return bool(np.isfinite(got).all() and np.isfinite(want).all())


def _min_cosine(got: npt.NDArray[np.float64], want: npt.NDArray[np.float64]) -> float:
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
    products = (got * want).sum(axis=-1)
    both_zero = (np.abs(got).max(axis=-1) == 0) & (np.abs(want).max(axis=-1) == 0)
    cosines = np.where(both_zero, 1.0, products / np.where(norms == 0, 1.0, norms))
    return float(cosines.min(initial=1.0))


def _max_length_error(got: npt.NDArray[np.float64], want: npt.NDArray[np.float64]) -> float:
    """By how much lengths differ, in the units of `HALF_LENGTH`; of one feature, by how much the value does."""
    if got.shape[-1] == 1:
        errors, lengths = np.abs(got - want)[..., 0], np.abs(want)[..., 0]
    else:
        lengths = np.linalg.norm(want, axis=-1)
        errors = np.abs(np.linalg.norm(got, axis=-1) - lengths)
    return float((errors / np.maximum(lengths, 1.0)).max(initial=0.0))
