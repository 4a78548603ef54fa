"""Wide channels of an activation in two: a lower and an upper part of the range, each with steps of its own.

After GELU a channel is near 0 for most tokens, and 25 times its standard deviation for some; steps that reach there are
coarse for all. `x` is ``min(x, threshold) + max(x - threshold, 0)``, and both are what uint8 gives when it saturates:
one at its largest level, the other at 0. So what makes the activation makes these channels twice, and nothing else is
computed. (Zhao et al., "Improving Neural Network Quantization without Retraining using Outlier Channel Splitting",
https://arxiv.org/abs/1901.09504, halves values, where both halves are rounded for every token.)
"""

from __future__ import annotations

__all__ = ["Split", "Widening", "chosen_split", "widening"]

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.quantize.products import WeightProduct, initializer_of

if TYPE_CHECKING:
    import onnx_ir

_PART = 48
"""One of so many channels is split: 32 of 1536, which take away a third of the noise; 128 take away 2 % more."""

_FRACTIONS = (0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Of a channel's range, where it may be split."""

_ELEMENTWISE = frozenset(
    {"Add", "Cast", "Div", "Elu", "Erf", "Gelu", "Mul", "Pow", "Relu", "Sigmoid", "Sub", "Swish", "Tanh"}
)

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Channels of an activation that are there twice.

    Attributes:
        channels: [split], int64; their upper parts follow the other channels, in this order.
        thresholds: [split], float32, where the upper parts begin.
        share: [split], float32, of tokens whose value is in the upper part.
    """

    channels: IntArray
    thresholds: FloatArray
    share: FloatArray

    def of_activation(self, activation: FloatArray) -> FloatArray:
        """[..., channels] -> [..., channels + split]"""
        wide = activation[..., self.channels]
        parted = np.concatenate([activation, np.maximum(wide - self.thresholds, 0)], axis=-1)
        parted[..., self.channels] = np.minimum(wide, self.thresholds)
        return parted

    def of_weight(self, weight: FloatArray) -> FloatArray:
        """[channels, outputs] -> [channels + split, outputs]"""
        return weight[self.order(len(weight))]

    def order(self, channels: int) -> IntArray:
        """[channels + split], of the channels that each is a copy of."""
        return np.concatenate([np.arange(channels), self.channels])


def chosen_split(
    rows: FloatArray, shares: npt.NDArray[np.float64], weights: Sequence[FloatArray], *, headroom: float
) -> Split | None:
    """The channels whose rounding makes most of a product's noise, split where that takes away most.

    Args:
        rows: [tokens, channels], of an activation.
        shares: [tokens], what each counts; their sum is 1.
        weights: [channels, outputs] each, that it is multiplied with.
        headroom: by how much ranges are widened for other texts.

    Returns:
        None if there are so few channels that none is split.
    """
    count = rows.shape[1] // _PART
    if not count:
        return None
    energy = sum((weight.astype(np.float64) ** 2).sum(1) for weight in weights)
    mean = shares @ rows
    lowest, highest = (mean + headroom * (ends - mean) for ends in (rows.min(0), rows.max(0)))
    span = highest - lowest
    thresholds = np.stack([lowest + fraction * span for fraction in _FRACTIONS])
    above = np.stack([shares @ (rows > threshold) for threshold in thresholds])
    fractions = np.array(_FRACTIONS)[:, None]
    left = (1 - above) * fractions**2 + above * (1 - fractions) ** 2
    best, every = left.argmin(0), np.arange(rows.shape[1])
    gain = (1 - left[best, every]) * span**2 * energy
    channels = np.sort(np.argsort(-gain, kind="stable")[:count])
    chosen = best[channels], channels
    return Split(
        channels=channels,
        thresholds=thresholds[chosen].astype(np.float32),
        share=above[chosen].astype(np.float32),
    )


@dataclass(frozen=True, kw_only=True)
class Widening:
    """What has to change for an activation to have some of its channels twice.

    Attributes:
        constants: nodes and the number of the input whose last axis' entries have to be repeated as the channels are.
        values: the activation and what it is made of, [..., channels] each.
    """

    constants: Sequence[tuple[onnx_ir.Node, int]]
    values: Sequence[onnx_ir.Value]


def widening(product: WeightProduct) -> Widening | None:
    """How to widen the activation of a product, which operators of single elements make of other products with weights.

    Returns:
        None for an activation that is made otherwise, or that something else reads.
    """
    source = product.source
    if source.shape is None or not isinstance(channels := source.shape[-1], int):
        return None
    constants: list[tuple[onnx_ir.Node, int]] = []
    values: list[onnx_ir.Value] = []
    nodes = {product.node}
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
    return Widening(constants=constants, values=values)


def _constant(value: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """The initializer that a value is, is cast from, or has the int8 values of."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "DequantizeLinear":
        return initializer_of(producer.inputs[0])
    return initializer_of(value)
