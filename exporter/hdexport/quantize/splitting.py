"""Wide channels of an activation in parts of their range, each with steps of its own.

After GELU a channel is near 0 for most tokens, and 25 times its standard deviation for some; steps that reach there are
coarse for all, and make the steps of the weights coarse that are multiplied with it. `x` is ``min(x, threshold) + max(x
- threshold, 0)``, and uint8 gives both when it saturates: one at its largest level, the other at 0. So the graph makes
these channels of the activation twice or more often, and computes nothing else. (Zhao et al., "Improving Neural Network
Quantization without Retraining using Outlier Channel Splitting", https://arxiv.org/abs/1901.09504, halves values, where
both halves are rounded for every token.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir

from hdexport.graph.weights import initializer_of
from hdexport.quantize.matmuls import WeightMatMul
from hdruntime.arrays import FloatArray, IntArray, WideArray

HEADROOM = 1.1
"""The distance from the mean to both ends is multiplied by this factor, because other texts have larger values than the
calibration's."""

_PARTS = 24
"""There is one more part per so many channels; the widest channels get them."""

_ROUNDS = 4
"""Rounds in which parts are given: the parts of one round may be split again in the next."""

_FRACTIONS = (0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Fractions of a part's range where the part may be split."""

_ELEMENTWISE = frozenset(
    {"Add", "Cast", "Div", "Elu", "Erf", "Gelu", "Mul", "Pow", "Relu", "Sigmoid", "Sub", "Swish", "Tanh"}
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which parts an activation is in. Parts of large and small ranges alternate, because neighbours have to share the
    range of weights.

    Attributes:
        sources: [parts], int64, the channel of each part.
        starts: [parts], float32, where it begins; negative infinity for the lowest of its channel.
        ends: [parts], float32, where it ends; infinity for the highest.
        share: [parts], float32, of tokens whose value is in the part.
    """

    sources: IntArray
    starts: FloatArray
    ends: FloatArray
    share: FloatArray

    def of_activation(self, activation: FloatArray) -> FloatArray:
        """[..., channels] -> [..., parts]"""
        return np.clip(activation[..., self.sources], self.starts, self.ends) - self.offsets

    def of_weight(self, weight: FloatArray) -> FloatArray:
        """[channels, outputs] -> [parts, outputs]"""
        return weight[self.sources]

    @property
    def offsets(self) -> FloatArray:
        """[parts], float32: the amount to subtract from a value, 0 for the lowest part."""
        return np.where(np.isfinite(self.starts), self.starts, 0).astype(np.float32)

    @property
    def followers(self) -> list[tuple[int, int]]:
        """Pairs of a part and the next of the same channel, lower ones first."""
        order = np.lexsort((self.starts, self.sources))
        pairs = zip(order[:-1].tolist(), order[1:].tolist(), strict=True)
        return [(lower, upper) for lower, upper in pairs if self.sources[lower] == self.sources[upper]]


def chosen_split(rows: FloatArray, shares: WideArray, weights: Sequence[FloatArray]) -> Split | None:
    """The channels whose rounding makes most of a matmul's noise, split where that removes most; None if channels are
    too few. `rows` are an activation's [tokens, channels], `shares` the tokens' weights, whose sum is 1, and `weights`
    [channels, outputs] each."""
    channels = rows.shape[1]
    if channels < _PARTS:
        return None
    energy = sum((weight.astype(np.float64) ** 2).sum(1) for weight in weights)
    mean = shares @ rows
    starts, ends = (mean + HEADROOM * (edge - mean) for edge in (rows.min(0), rows.max(0)))
    lowest, highest = starts, ends
    sources = np.arange(channels)
    noise, thresholds, gain = _best_thresholds(rows, shares, starts, ends)
    for left in np.array_split(np.arange(channels // _PARTS), _ROUNDS):
        split = np.argsort(-gain * energy[sources], kind="stable")[: len(left)]
        between, source = thresholds[split], sources[split]
        sources = np.concatenate([sources, source])
        starts, ends = np.concatenate([starts, between]), np.concatenate([ends, ends[split]])
        ends[split] = between
        changed = np.concatenate([split, np.arange(len(sources) - len(split), len(sources))])
        best = _best_thresholds(rows[:, sources[changed]], shares, starts[changed], ends[changed])
        noise, thresholds, gain = (np.concatenate([each, each[: len(split)]]) for each in (noise, thresholds, gain))
        noise[changed], thresholds[changed], gain[changed] = best
    span = ends - starts
    by_width = np.argsort(-(span**2) * energy[sources], kind="stable")
    order = np.empty_like(by_width)
    half = -(-len(order) // 2)
    order[0::2], order[1::2] = by_width[:half], by_width[half:][::-1]
    # Another text may have tokens in a part in which none was seen.
    share = np.maximum(noise / np.maximum(span, np.finfo(np.float32).tiny) ** 2, 1 / len(rows))
    is_lowest, is_highest = starts <= lowest[sources], ends >= highest[sources]
    return Split(
        sources=sources[order],
        starts=np.where(is_lowest, -np.inf, starts)[order].astype(np.float32),
        ends=np.where(is_highest, np.inf, ends)[order].astype(np.float32),
        share=share[order].astype(np.float32),
    )


def _best_thresholds(
    rows: FloatArray, shares: WideArray, starts: WideArray, ends: WideArray
) -> tuple[WideArray, WideArray, WideArray]:
    """Noise of each part, the threshold that removes most of it, and how much it removes; [parts] each. The noise is
    the square of the part's range, counted for the tokens whose value is there. `rows` are [tokens, parts]."""
    span, every = ends - starts, np.arange(len(starts))
    thresholds = np.stack([starts + fraction * span for fraction in _FRACTIONS])
    below = np.stack([shares @ (rows < each) for each in (starts, *thresholds, ends)])
    fractions = np.array(_FRACTIONS)[:, None]
    left = (below[1:-1] - below[0]) * fractions**2 + (below[-1] - below[1:-1]) * (1 - fractions) ** 2
    best = left.argmin(0)
    noise = (below[-1] - below[0]) * span**2
    return noise, thresholds[best, every], noise - left[best, every] * span**2


class SplittableActivation(NamedTuple):
    """An activation that can have some of its channels twice, and what has to change with it.

    Attributes:
        constants: nodes and the number of the input whose last axis' entries have to be repeated as the channels are.
        values: the activation and the values that it is made of, [..., channels] each.
    """

    constants: Sequence[tuple[onnx_ir.Node, int]]
    values: Sequence[onnx_ir.Value]


def splittable_activation(matmul: WeightMatMul) -> SplittableActivation | None:
    """The activation of a matmul, which elementwise operators make of the results of other matmuls with weights.
    None for an activation that is made in another way, or that something else reads."""
    source = matmul.source
    if source.shape is None or not isinstance(channels := source.shape[-1], int):
        return None
    constants: list[tuple[onnx_ir.Node, int]] = []
    values: list[onnx_ir.Value] = []
    nodes = {matmul.node}
    waiting: list[Any] = [source]
    while waiting:
        value = waiting.pop()
        if value in values:
            continue
        node = value.producer()
        if node is None or value.is_graph_output():
            return None
        values.append(value)
        nodes.add(node)
        if node.op_type == "MatMul" and _constant(node.inputs[1]) is not None:
            constants.append((node, 1))
            continue
        if node.op_type not in _ELEMENTWISE:
            return None
        for index, read in enumerate(node.inputs):
            constant = _constant(read)
            if constant is None:
                waiting.append(read)
            elif constant.shape is None or (size := math.prod(constant.shape.numpy())) not in (1, channels):
                return None
            elif size == channels:
                constants.append((node, index))
    if any(use.node not in nodes for value in values for use in value.uses()):
        return None
    return SplittableActivation(constants=constants, values=values)


def _constant(value: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """The initializer that a value is, is cast from, or has the int8 values of."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "DequantizeLinear":
        return initializer_of(producer.inputs[0])
    return initializer_of(value)
