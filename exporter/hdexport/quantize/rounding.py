"""Scales of activations, and weights rounded to int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdexport.quantize.splitting import HEADROOM, Split
from hdruntime.arrays import FloatArray, WideArray

_LEVELS = 255
"""Steps of uint8, which activations are rounded to."""

_LARGEST = 127
"""Largest magnitude of a weight."""

_LARGEST_PAIR = 128
"""Largest sum of two weights of one sign, of channels 0 and 1, 2 and 3, and so on. Processors without VNNI add the
products of such a pair in 16 bits and saturate; 255 * 128 fits."""

_EXPONENT = 0.9
"""Exponent of a channel's range in the channel's smallest scale; see `activation_scale`. With 1, every channel uses all
levels, and a text with larger values than the calibration's is clipped in many channels."""

_ITERATIONS = 20
"""Iterations over scales and the steps of weights, which determine each other."""

_HANDED_ON = 0.25
"""Part of the variance of a weight's rounding errors that stays in the product when errors are handed on."""

_DAMPING = 0.03
"""Part of the channels' mean variance that is added to each. Without it, errors were handed on by channels that vary
together in few texts only, and tokens of another kind had 2 to 5 times the error."""

_SMALLEST = 1e-6

_BLOCK = 128
"""Channels whose rounding errors are handed on together."""


@dataclass
class Statistics:
    """Statistics of an activation [tokens, channels] over some texts, in float64.

    Attributes:
        lowest, highest: [channels].
        total: [channels], the weighted sum over tokens.
        products: [channels, channels], the weighted sum over tokens of products of two channels.
        tokens: number of them, weighted.
    """

    lowest: WideArray
    highest: WideArray
    total: WideArray
    products: WideArray
    tokens: float = 0

    @classmethod
    def empty(cls, channels: int) -> Statistics:
        """Statistics of no token."""
        zeros = np.zeros(channels)
        return cls(zeros + np.inf, zeros - np.inf, zeros, np.zeros((channels, channels)))

    def add(self, activation: FloatArray, *, weight: float = 1) -> None:
        """Counts the tokens of an activation [..., channels]. The weight of each token is for sums; the lowest and
        highest values are those of all tokens."""
        rows = activation.reshape(-1, activation.shape[-1])
        self.lowest = np.minimum(self.lowest, rows.min(0))
        self.highest = np.maximum(self.highest, rows.max(0))
        self.total = self.total + weight * rows.sum(0, dtype=np.float64)
        self.products += weight * (rows.T @ rows)
        self.tokens += weight * len(rows)

    @property
    def mean(self) -> WideArray:
        """[channels]."""
        return self.total / self.tokens

    @property
    def covariance(self) -> WideArray:
        """[channels, channels]."""
        return self.products / self.tokens - np.outer(self.mean, self.mean)


@dataclass(frozen=True, kw_only=True)
class ActivationScale:
    """How an activation becomes uint8: ``round((value - start) / scale) + zero_point``, or, as graphs compute it,
    ``round(value * factor + offset)``, each [channels]. `split` says which parts of channels the channels are; None for
    whole channels."""

    scale: FloatArray
    zero_point: npt.NDArray[np.uint8]
    split: Split | None = None

    @property
    def start(self) -> FloatArray:
        """[channels], float32: 0; of an upper part, the largest value that the part below has a level for."""
        start = np.zeros_like(self.scale)
        for lower, upper in self.split.followers if self.split is not None else []:
            start[upper] = start[lower] + self.scale[lower] * np.float32(_LEVELS - int(self.zero_point[lower]))
        return start

    @property
    def factor(self) -> FloatArray:
        """[channels], float32."""
        return np.reciprocal(self.scale)

    @property
    def offset(self) -> FloatArray:
        """[channels], float32."""
        return self.zero_point.astype(np.float32) - self.start / self.scale


class Int8Weight(NamedTuple):
    """A weight with the scales of its activation's channels multiplied in.

    Attributes:
        values: [channels, outputs], int8.
        scale: [outputs], float32.
        bias: [outputs], float32: added to the products of uint8 and int8, it removes what zero points add and the mean
            of the rounding errors.
    """

    values: npt.NDArray[np.int8]
    scale: FloatArray
    bias: FloatArray


def activation_scale(
    statistics: Statistics, weights: Sequence[FloatArray], split: Split | None = None
) -> ActivationScale:
    """The scale of each channel of an activation that is multiplied with weights, [channels, outputs] each.

    A small scale rounds activations finely, and a large one weights, with which scales are multiplied. The noise of
    both in a channel is ``p * w**2 * s**2 + steps**2 * v / s**2``, where `p` is how often it is rounded, `w` its
    weights and `v` its variance: the least is where both are the same, but every channel's range must fit.
    """
    weight = np.concatenate(weights, axis=1).astype(np.float64)
    lowest, highest = _widened(statistics, split)
    span = np.maximum(highest - lowest, _SMALLEST)
    largest = np.maximum(np.abs(weight).max(1), _SMALLEST)
    # A part of a channel is exact where the value is in another part.
    rounded = (1 if split is None else split.share) * (weight**2).sum(1)
    variance = np.diagonal(statistics.covariance)
    smallest = span**_EXPONENT / largest ** (1 - _EXPONENT)
    smallest *= (span / smallest).max() / _LEVELS
    scale, candidates = smallest, []
    for _ in range(_ITERATIONS):
        steps = _steps(weight * scale[:, None])
        of_weights = _HANDED_ON * (steps**2).sum() * variance
        candidates.append((float((rounded * scale**2 + of_weights / scale**2).sum()), scale))
        even = (of_weights / np.maximum(rounded, _SMALLEST**2)) ** 0.25
        scale = np.maximum(smallest, np.sqrt(scale * np.maximum(even, _SMALLEST)))
    scale = min(candidates, key=lambda candidate: candidate[0])[1]
    middle = (highest + lowest) / 2
    zero_point = np.round(_LEVELS / 2 - middle / scale)
    if split is not None:
        of_end = np.round(_LEVELS - (split.ends - split.offsets) / scale)
        zero_point = np.where(np.isfinite(split.starts), 0, np.where(np.isfinite(split.ends), of_end, zero_point))
    zero_point = np.clip(zero_point, 0, _LEVELS)
    return ActivationScale(scale=scale.astype(np.float32), zero_point=zero_point.astype(np.uint8), split=split)


def _widened(statistics: Statistics, split: Split | None) -> tuple[WideArray, WideArray]:
    """The lowest and highest values that are expected of other texts, [channels] each; 0 is between them."""
    mean = statistics.mean
    lowest = np.minimum(mean - HEADROOM * (mean - statistics.lowest), 0)
    highest = np.maximum(mean + HEADROOM * (statistics.highest - mean), 0)
    if split is not None:
        lowest = np.where(np.isfinite(split.starts), 0, lowest)
        highest = np.where(np.isfinite(split.ends), split.ends - split.offsets, highest)
    return lowest, highest


def round_weight(statistics: Statistics, activation: ActivationScale, weight: FloatArray) -> Int8Weight:
    """Rounds a weight, [channels, outputs], channel by channel: the following channels, as far as they vary together
    with it, make up for the change of the product by rounding."""
    scale = activation.scale.astype(np.float64)
    exact = weight * scale[:, None]
    steps = np.maximum(_steps(exact), _SMALLEST * scale.min() / _LARGEST)
    # The activation's own rounding is noise in each channel, 1/12 of a step's square, and keeps `together` invertible.
    together = statistics.covariance / np.outer(scale, scale) + np.eye(len(scale)) / 12
    damping = _DAMPING * np.diagonal(together).mean()
    values = _rounded(exact / steps, together + damping * np.eye(len(scale)))
    difference = exact - values * steps
    zero = activation.zero_point.astype(np.float64)
    bias = (statistics.mean / scale) @ difference - zero @ (values * steps)
    return Int8Weight(
        values=values.astype(np.int8),
        scale=steps.astype(np.float32),
        bias=bias.astype(np.float32),
    )


def _steps(exact: WideArray) -> WideArray:
    """[outputs], the smallest steps of weights [channels, outputs] that the integers' limits allow."""
    paired = np.concatenate([exact, np.zeros((len(exact) % 2, exact.shape[1]))])
    positive = np.maximum(paired, 0)
    same_sign = (positive, positive - paired)
    of_pairs = np.maximum(*((each[0::2] + each[1::2]).max(0) for each in same_sign))
    return np.maximum(np.abs(exact).max(0) / _LARGEST, of_pairs / _LARGEST_PAIR)


def _rounded(exact: WideArray, together: WideArray) -> WideArray:
    """Integers [channels, outputs] near the exact weights whose products with activations are nearer still."""
    order = np.argsort(-np.diagonal(together), kind="stable")
    place = np.argsort(order)
    neighbours = np.append(place, len(place))[np.minimum(order ^ 1, len(place))]
    upper = np.linalg.cholesky(np.linalg.inv(together[np.ix_(order, order)])).T
    left, values = exact[order], np.zeros((len(exact) + 1, exact.shape[1]))
    for start in range(0, len(left), _BLOCK):
        end = min(start + _BLOCK, len(left))
        errors = np.empty((end - start, left.shape[1]))
        for row in range(start, end):
            taken = values[neighbours[row]]  # 0 while it is not rounded
            most = np.minimum(_LARGEST, _LARGEST_PAIR - np.maximum(taken, 0))
            least = np.maximum(-_LARGEST, -_LARGEST_PAIR - np.minimum(taken, 0))
            values[row] = np.clip(np.round(left[row]), least, most)
            errors[row - start] = (left[row] - values[row]) / upper[row, row]
            left[row + 1 : end] -= np.outer(upper[row, row + 1 : end], errors[row - start])
        left[end:] -= upper[start:end, end:].T @ errors
    return values[place]
