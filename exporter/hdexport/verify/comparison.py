"""Whether two arrays hold the same answer, by the tolerances that hdexport promises."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hdexport.support.check import Comparison
from hdruntime.arrays import FloatingArray, WideArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.verification import Tolerance

FLOAT32_ATOL = 1e-4
"""Largest absolute difference of a float32 graph's outputs from PyTorch's."""

FLOAT32_STEPS = 2
"""Large values may differ by this many units in the last place of PyTorch's value, if that is more than `FLOAT32_ATOL`.

From 1024 on, float32 has no two numbers within `FLOAT32_ATOL`; BigBird's question answering has scores of -1e6, where
neighbours are 0.06 apart.
"""

SUM_PART = 1e-6
"""Values of outputs that may hold sums over the tokens of a text (`SUMS`) may differ by this part of the text's largest
value.

Sums grow with the text, and so do errors of their terms. A tiny BERT with SPLADE's pooling by sum, largest value 3338
at 4096 tokens: PyTorch differs from float64 by 2e-7 of it, each graph from PyTorch by 2e-7 to 3e-7.
"""

SUMS = ("sparse_embedding",)
"""Outputs that may hold such sums; where they do not, their largest value is a few units, and `SUM_PART` allows no
more."""

HALF_COSINE = 0.999
"""Smallest cosine, per token, of a half-precision graph's outputs with PyTorch's in float32."""

HALF_LENGTH = 0.05
"""Largest difference of such a vector's length, relative to PyTorch's, or absolute where that is below 1.

The cosine does not see a scale; a vector within `HALF_COSINE` is off by up to 0.045 of its length across it, so this
asks for no more along it.
"""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How far the answers of a precision may be from PyTorch's in float32.

    Attributes:
        cosine: smallest cosine of a vector.
        length: largest difference of a vector's length, relative to PyTorch's, or absolute where that is below 1;
            vectors of a text's tokens are held to it on average.
        token_length: the same for the vector of a single token.
    """

    cosine: float
    length: float
    token_length: float

    @property
    def scores(self) -> float:
        """Largest error of a score, as a part of the spread of the scores that it is compared with.

        A vector within `cosine` is off by up to this part of its length across it. Projected by weights that do not
        know of the error, it shifts scores by the same part of the differences that the vector itself makes.
        """
        return _across(self.cosine)

    def allowing(self, loss: float) -> Rounding:
        """The tolerances where PyTorch's own bfloat16 loses so much of the cosine; never narrower than these."""
        cosine = min(self.cosine, max(LEAST_COSINE, 1 - _LOSS_FACTOR * loss))
        return self if cosine == self.cosine else replace(self, cosine=cosine, token_length=2 * _across(cosine))


def _across(cosine: float) -> float:
    """Part of its length by which a vector of that cosine is off across it."""
    return math.sqrt(2 * (1 - cosine))


_LOSS_FACTOR = 1.5
"""A graph in bfloat16 may lose this many times what PyTorch's bfloat16 loses of the cosine, if that is more than the
model-independent tolerance: the two round different values. OpenVINO lost 0.9 times as much with 36 layers of
Qwen3-Embedding-4B's width."""

LEAST_COSINE = 0.995
"""Smallest cosine that bfloat16 may have whatever PyTorch's has: that of int8."""

_HALF = Rounding(cosine=HALF_COSINE, length=HALF_LENGTH, token_length=HALF_LENGTH)

ROUNDING: Mapping[Precision, Rounding] = {
    Precision.BFLOAT16: Rounding(cosine=0.999, length=0.02, token_length=2 * _across(0.999)),
    Precision.INT8: Rounding(cosine=0.995, length=0.02, token_length=2 * _across(0.995)),
}
"""Precision that a session may be loaded with on a CPU instead of float32 -> tolerances of its answers.

A scale, which the cosine does not see, shows in the average over a text, and no bfloat16 keeps each token's length to
2 %: of 512 random tokens of the sample model, PyTorch's own is off by 4.7 % at the worst (of English by 2.5 %) and by
0.2 % on average. OpenVINO's is off by 3.0 % and 0.3 %, with weights in bfloat16 by 4.5 % and 0.2 %. So a single token's
length may be off by twice as much as its direction.

The sample model, 24 texts of up to 512 tokens, has a worst cosine of 0.99998 in bfloat16 and of 0.996 to 0.9993 in
int8, by how its activations are scaled.
"""

SCORES = ("logits", "start_logits", "end_logits", "log_probabilities")
"""Outputs whose values are read against each other, along the last axis; all others hold vectors."""

_MASKED_SCORE = 1e4
"""Least difference of a masked score from the largest of its row; masked scores are not part of the spread."""


_SLICE_VALUES = 2**18
"""Values that are compared at once: float64 copies of a large output would take four times its memory."""


def different(tolerance: Tolerance) -> Comparison:
    """The result where outputs cannot be compared by value: NaN, infinity, another shape, or no output."""
    return Comparison(max_abs_error=float("inf"), min_cosine=-1.0, passed=False, tolerance=tolerance)


def tolerance_of(name: str, *, half_precision: bool, precision: Precision, of_tokens: bool) -> Tolerance:
    """Limits of one output; see `compare_output` for the arguments."""
    rounding = _rounding_of(precision, half_precision=half_precision)
    if rounding is None:
        return _tolerance_of_float32(name in SUMS)
    if name in SCORES:
        return _tolerance_of_scores(rounding)
    return _tolerance_of_vectors(rounding, of_tokens=of_tokens and rounding is not _HALF)


def _rounding_of(precision: Precision, *, half_precision: bool) -> Rounding | None:
    """The tolerances of a precision, or of weights in half precision; None for float32."""
    return ROUNDING.get(precision, _HALF if half_precision else None)


def _tolerance_of_float32(may_be_sums: bool) -> Tolerance:
    return Tolerance(atol=FLOAT32_ATOL, ulps=FLOAT32_STEPS, rtol=SUM_PART if may_be_sums else None)


def _tolerance_of_vectors(rounding: Rounding, *, of_tokens: bool) -> Tolerance:
    token_length = rounding.token_length if of_tokens else None
    return Tolerance(cosine=rounding.cosine, length=rounding.length, token_length=token_length)


def _tolerance_of_scores(rounding: Rounding) -> Tolerance:
    return Tolerance(score_spread=rounding.scores)


def compare(
    actual: FloatingArray, expected: FloatingArray, *, half_precision: bool, may_be_sums: bool = False
) -> Comparison:
    """Compares one output's real values, [..., features] each, in slices: the memory for it does not grow with the
    output. In half precision, it compares directions and lengths of vectors instead of values; `may_be_sums` is about
    `SUM_PART`. Shapes that differ are a mistake of the caller, a ValueError."""
    return _compare_slices(
        actual,
        expected,
        functools.partial(_compare_vectors, rounding=_HALF, of_tokens=False)
        if half_precision
        else functools.partial(_compare_float32, may_be_sums=may_be_sums),
    )


def compare_output(
    name: str,
    actual: FloatingArray,
    expected: FloatingArray,
    *,
    half_precision: bool,
    precision: Precision,
    of_tokens: bool,
    own_loss: float = 0.0,
) -> Comparison:
    """Compares one output, [..., features], by the precision that it was computed in.

    Args:
        name: of the output, which says whether it holds vectors or scores.
        half_precision: whether weights were rounded to half precision.
        precision: the CPU's precision; for ``auto``, `half_precision` decides alone.
        of_tokens: see `compare_vectors`.
        own_loss: `rounding_loss` of PyTorch in bfloat16.
    """
    rounding = _rounding_of(precision, half_precision=half_precision)
    if rounding is None or (rounding is _HALF and name not in SCORES):
        return compare(actual, expected, half_precision=half_precision, may_be_sums=name in SUMS)
    rounding = rounding.allowing(own_loss)
    if name in SCORES:
        return compare_scores(actual, expected, rounding=rounding)
    return compare_vectors(actual, expected, rounding=rounding, of_tokens=of_tokens)


def compare_vectors(
    actual: FloatingArray, expected: FloatingArray, *, rounding: Rounding, of_tokens: bool
) -> Comparison:
    """Compares directions and lengths of vectors, [..., features], as `compare` does; a single feature, a score, by its
    value. For the tokens of texts (`of_tokens`), lengths are compared on average, too."""
    compare_slice = functools.partial(_compare_vectors, rounding=rounding, of_tokens=of_tokens)
    return _compare_slices(actual, expected, compare_slice)


def compare_scores(actual: FloatingArray, expected: FloatingArray, *, rounding: Rounding) -> Comparison:
    """Compares scores, [..., classes or tokens], that are read against each other, such as logits of classes, or of the
    tokens of a text.

    The cosine says little of scores: for two classes it is -1 or 1, and a constant that all share hides the rest. So
    the unit is the spread of the scores, the largest less the smallest, or 1 where that is less: scores are logarithms
    of odds, and an undecided model's are not held to more than a decided one's. The best must be PyTorch's best, or,
    for PyTorch, no further from it than one score may be off.
    """
    return _compare_slices(actual, expected, functools.partial(_compare_scores, rounding=rounding))


def rounding_loss(name: str, rounded: FloatingArray, expected: FloatingArray) -> float:
    """The cosine that an output, [..., features], loses by rounding: 1 less the smallest cosine of a vector.

    The loss of scores is that of vectors whose scores have the largest error (`Rounding.scores`). An output with a
    value that is not finite has the loss 0, which widens no tolerance.
    """
    losses = [0.0]
    for got, want in _slices(rounded, expected):
        if not _finite(got, want):
            return 0.0
        losses.append(
            float(_score_errors(got, want).max(initial=0.0)) ** 2 / 2 if name in SCORES else 1 - _min_cosine(got, want)
        )
    return max(losses)


def _compare_slices(
    actual: FloatingArray, expected: FloatingArray, compare_slice: Callable[[WideArray, WideArray], Comparison]
) -> Comparison:
    return combined([compare_slice(*pair) for pair in _slices(actual, expected)])


def _slices(actual: FloatingArray, expected: FloatingArray) -> Iterator[tuple[WideArray, WideArray]]:
    """Yield some rows of both, [rows, features] each, at a time."""
    if actual.shape != expected.shape:
        raise ValueError(f"The shapes {actual.shape} and {expected.shape} differ.")
    features = actual.shape[-1]
    got, want = actual.reshape(-1, features), expected.reshape(-1, features)
    rows = max(1, _SLICE_VALUES // max(1, features))
    for first in range(0, max(1, len(got)), rows):
        yield got[first : first + rows].astype(np.float64), want[first : first + rows].astype(np.float64)


def combined(parts: Sequence[Comparison]) -> Comparison:
    """One comparison of several, at least one, about parts of the same output."""
    return Comparison(
        max_abs_error=max(part.max_abs_error for part in parts),
        min_cosine=min(part.min_cosine for part in parts),
        passed=all(part.passed for part in parts),
        tolerance=functools.reduce(operator.or_, (part.tolerance for part in parts)),
    )


def _compare_float32(got: WideArray, want: WideArray, *, may_be_sums: bool) -> Comparison:
    """Compare [rows, features]: every value holds the tolerance."""
    tolerance = _tolerance_of_float32(may_be_sums)
    if not _finite(got, want):
        return different(tolerance)
    sizes = np.abs(want)
    steps = FLOAT32_STEPS * np.spacing(sizes.astype(np.float32))
    largest = sizes.max(axis=-1, initial=0.0, keepdims=True)
    parts = SUM_PART * largest if may_be_sums else np.zeros_like(largest)
    errors = np.abs(got - want)
    return Comparison(
        max_abs_error=float(errors.max(initial=0.0)),
        min_cosine=_min_cosine(got, want),
        passed=bool((errors <= np.maximum(np.maximum(steps, parts), FLOAT32_ATOL)).all()),
        tolerance=tolerance,
    )


def _compare_vectors(got: WideArray, want: WideArray, *, rounding: Rounding, of_tokens: bool) -> Comparison:
    """Compare [rows, features]: every vector holds the tolerances of its direction and its length."""
    tolerance = _tolerance_of_vectors(rounding, of_tokens=of_tokens)
    if not _finite(got, want):
        return different(tolerance)
    cosine = _min_cosine(got, want)
    # One feature, a reranker's score, has a sign and no direction: its length is all there is to compare.
    is_score = got.shape[-1] == 1
    errors = _length_errors(got, want)
    largest = float(np.abs(errors).max(initial=0.0))
    if of_tokens:
        # The average of a few tokens is not much better than one of them.
        on_average = max(rounding.length, rounding.token_length / math.sqrt(max(1, len(errors))))
        lengths_hold = largest <= rounding.token_length and abs(float(errors.mean())) <= on_average
    else:
        lengths_hold = largest <= rounding.length
    return Comparison(
        max_abs_error=float(np.abs(got - want).max(initial=0.0)),
        min_cosine=cosine,
        passed=(is_score or cosine >= rounding.cosine) and lengths_hold,
        tolerance=tolerance,
    )


def _compare_scores(got: WideArray, want: WideArray, *, rounding: Rounding) -> Comparison:
    """Compare [rows, classes or tokens]: every score holds the tolerance, and the best is the same unless as close."""
    tolerance = _tolerance_of_scores(rounding)
    if not _finite(got, want):
        return different(tolerance)
    return Comparison(
        max_abs_error=float(np.abs(got - want).max(initial=0.0)),
        min_cosine=_min_cosine(got, want),
        passed=bool((_score_errors(got, want) <= rounding.scores).all()),
        tolerance=tolerance,
    )


def _score_errors(got: WideArray, want: WideArray) -> WideArray:
    """[rows, classes or tokens + 1], errors of the scores, and how far the best is from PyTorch's best, as parts of the
    spread."""
    largest = want.max(axis=-1, keepdims=True)
    is_masked = want < largest - _MASKED_SCORE
    spread = (largest - np.where(is_masked, largest, want).min(axis=-1, keepdims=True)).clip(min=1.0)
    if want.shape[-1] == 1:
        # A single score, a reranker's: how scores spread over texts is unknown, its own value is known.
        spread = np.abs(want).clip(min=1.0)
    best = np.take_along_axis(want, got.argmax(axis=-1, keepdims=True), axis=-1)
    relative = np.abs(got - want) / np.where(is_masked, np.abs(want), spread)
    return np.concatenate([relative, (largest - best) / spread], axis=-1)


def _finite(got: WideArray, want: WideArray) -> bool:
    return bool(np.isfinite(got).all() and np.isfinite(want).all())


def _min_cosine(got: WideArray, want: WideArray) -> float:
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
    products = (got * want).sum(axis=-1)
    both_zero = (np.abs(got).max(axis=-1) == 0) & (np.abs(want).max(axis=-1) == 0)
    cosines = np.where(both_zero, 1.0, products / np.where(norms == 0, 1.0, norms))
    return float(cosines.min(initial=1.0))


def _length_errors(got: WideArray, want: WideArray) -> WideArray:
    """[rows], by how much lengths differ, in the units of `HALF_LENGTH`; of one feature, by how much the value does."""
    if got.shape[-1] == 1:
        errors, lengths = np.abs(got - want)[..., 0], np.abs(want)[..., 0]
    else:
        lengths = np.linalg.norm(want, axis=-1)
        errors = np.linalg.norm(got, axis=-1) - lengths
    return errors / np.maximum(lengths, 1.0)
