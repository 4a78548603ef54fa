"""Run a bundle's float graph on texts, and learn how the activations and weights of its layers are rounded best."""

from __future__ import annotations

__all__ = ["CalibratedProduct", "calibrate"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.quantize.products import WeightProduct, constant_array, weight_products
from hdexport.quantize.rounding import ActivationScale, Int8Weight, Statistics, activation_scale, round_weight
from hdexport.verify.single_texts import single_text_runner
from hdruntime.bundle.reader import Bundle

if TYPE_CHECKING:
    import onnx_ir

_RARE_SHARE = 0.1
"""Of the weight of all tokens, that of rare ones together."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CalibratedProduct:
    """A product with a weight, rounded.

    Attributes:
        activation: one object for all products that round the same activation.
        weight: its int8 values.
    """

    activation: ActivationScale
    weight: Int8Weight


def calibrate(
    bundle: Bundle,
    model: onnx_ir.Model,
    texts: Sequence[IntArray],
    *,
    rare: Sequence[IntArray] = (),
    did: Callable[[int], None] = lambda tokens: None,
) -> dict[str, CalibratedProduct]:
    """Calibrate the products with weights of a float32 graph.

    Products of one activation share its scale, and so do products of one weight, which layers may share.

    Args:
        bundle: in whose files the weights are.
        model: the graph, lowered for ONNX Runtime on a CPU; it is changed.
        texts: [tokens] each.
        rare: likewise, of tokens that the texts may lack: they widen ranges, and count little in what is rounded best.
        did: called with the tokens of each text.

    Returns:
        weight's name -> product; empty for a model without such products.
    """
    # What a body computes cannot be an output of the graph.
    products = [product for product in weight_products(model) if product.node.graph is model.graph]
    groups = _groups(products)
    calibrated = {}
    for names, found in zip(groups.values(), _statistics(bundle, model, groups, texts, rare, did), strict=True):
        arrays = {name: constant_array(_product(products, name).node.inputs[1]) for name in names}
        weights = {name: array for name, array in arrays.items() if array is not None}
        activation = activation_scale(found, list(weights.values()))
        for name, weight in weights.items():
            rounded = round_weight(found, activation, weight)
            calibrated[name] = CalibratedProduct(activation=activation, weight=rounded)
    return calibrated


def _product(products: Sequence[WeightProduct], name: str) -> WeightProduct:
    return next(product for product in products if product.weight == name)


def _groups(products: Sequence[WeightProduct]) -> dict[tuple[onnx_ir.Value, ...], list[str]]:
    """Activations that share a scale -> the weights that they are multiplied with."""
    groups: list[tuple[list[onnx_ir.Value], list[str]]] = []
    for product in products:
        joined = [group for group in groups if product.source in group[0] or product.weight in group[1]]
        merged = ([product.source], [product.weight])
        for group in joined:
            groups.remove(group)
            merged[0].extend(group[0])
            merged[1].extend(group[1])
        groups.append((list(dict.fromkeys(merged[0])), list(dict.fromkeys(merged[1]))))
    return {tuple(sources): sorted(names) for sources, names in groups}


def _statistics(
    bundle: Bundle,
    model: onnx_ir.Model,
    groups: Mapping[tuple[onnx_ir.Value, ...], Sequence[str]],
    texts: Sequence[IntArray],
    rare: Sequence[IntArray],
    did: Callable[[int], None],
) -> list[Statistics]:
    """Of each group, in order."""
    if not groups:
        return []
    own = [str(output.name) for output in model.graph.outputs]
    for sources in groups:
        model.graph.outputs.extend(source for source in sources if str(source.name) not in own)
    run = single_text_runner(bundle, model)
    names = {str(source.name): number for number, sources in enumerate(groups) for source in sources}
    found: dict[int, Statistics] = {}
    of_rare = _RARE_SHARE / (1 - _RARE_SHARE) * sum(map(len, texts)) / max(sum(map(len, rare)), 1)
    for text, weight in [*((text, 1.0) for text in texts), *((text, of_rare) for text in rare)]:
        for name, activation in run(list(names), text).items():
            number = names[name]
            if number not in found:
                found[number] = Statistics.empty(activation.shape[-1])
            found[number].add(activation, weight=weight)
        did(len(text))
    return [found[number] for number in range(len(groups))]
