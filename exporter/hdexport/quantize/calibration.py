"""Runs a bundle's float graph on texts to find how the activations and weights of its layers are rounded best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir

from hdexport.quantize.matmuls import WeightMatMul, constant_array, weight_matmuls
from hdexport.quantize.rounding import ActivationScale, Int8Weight, Statistics, activation_scale, round_weight
from hdexport.quantize.splitting import Split, chosen_split, splittable_activation
from hdexport.quantize.texts import CalibrationTexts
from hdexport.verify.single_texts import single_text_runner
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.reader import Bundle

_RARE_SHARE = 0.1
"""Share of the rare tokens in the weight of all tokens."""

_EVERY_SEEN_FIRST = 8
"""Every so many texts tell which channels are wide."""

_TOGETHER = 1024
"""Tokens that are counted at once, in texts of any length, so that products of channels take about as long."""


class CalibratedMatMul(NamedTuple):
    """A matmul with a weight, rounded; matmuls of the same activation share one object `activation`."""

    activation: ActivationScale
    weight: Int8Weight


def calibrate(
    bundle: Bundle,
    model: onnx_ir.Model,
    texts: CalibrationTexts,
    *,
    did: Callable[[int], None] = lambda tokens: None,
) -> dict[str, CalibratedMatMul]:
    """Calibrates the matmuls with weights of a float32 graph, lowered for ONNX Runtime on a CPU, which is changed:
    weight's name -> matmul. Matmuls of one activation share its scale, and so do matmuls of one weight, which layers
    may share. Rare texts, and texts behind padding, make ranges larger and count little in the choice of the rounding.
    `did` is called with the tokens that ran, now and then."""
    # Values that a body computes cannot be outputs of the graph.
    matmuls = [matmul for matmul in weight_matmuls(model) if matmul.node.graph is model.graph]
    groups = [_group(sharing) for sharing in _sharing_a_scale(matmuls)]
    calibrated = {}
    for group, statistics in zip(groups, _statistics(bundle, model, groups, texts, did), strict=True):
        split = group.split
        weights = {name: split.of_weight(each) if split else each for name, each in group.weights.items()}
        activation = activation_scale(statistics, list(weights.values()), split)
        for name, weight in weights.items():
            rounded = round_weight(statistics, activation, weight)
            calibrated[name] = CalibratedMatMul(activation=activation, weight=rounded)
    return calibrated


@dataclass(kw_only=True)
class _Group:
    """Activations that share a scale.

    Attributes:
        sources: the activations.
        weights: name -> [channels, outputs], of all that they are multiplied with.
        may_split: whether all of them can have some channels twice.
        split: which channels; None until some texts were seen, and where there is no use for it.
    """

    sources: Sequence[onnx_ir.Value]
    weights: dict[str, FloatArray]
    may_split: bool
    split: Split | None = None


def _group(matmuls: Sequence[WeightMatMul]) -> _Group:
    by_weight = {matmul.weight: matmul for matmul in matmuls}
    arrays = {name: constant_array(by_weight[name].node.inputs[1]) for name in sorted(by_weight)}
    return _Group(
        sources=list(dict.fromkeys(matmul.source for matmul in matmuls)),
        weights={name: array for name, array in arrays.items() if array is not None},
        may_split=all(splittable_activation(matmul) is not None for matmul in matmuls),
    )


def _sharing_a_scale(matmuls: Sequence[WeightMatMul]) -> list[list[WeightMatMul]]:
    """Lists of matmuls that share a scale: the matmuls of an activation, and the matmuls of a weight."""
    groups: list[list[WeightMatMul]] = []
    for matmul in matmuls:
        joined = [
            group
            for group in groups
            if any(matmul.source is each.source or matmul.weight == each.weight for each in group)
        ]
        for group in joined:
            groups.remove(group)
        groups.append([matmul, *itertools.chain(*joined)])
    return groups


def _statistics(
    bundle: Bundle,
    model: onnx_ir.Model,
    groups: Sequence[_Group],
    texts: CalibrationTexts,
    did: Callable[[int], None],
) -> list[Statistics]:
    """Statistics of each group, in order; the channels to split are chosen after the first texts."""
    if not groups:
        return []
    own = [str(output.name) for output in model.graph.outputs]
    for group in groups:
        model.graph.outputs.extend(source for source in group.sources if str(source.name) not in own)
    run = single_text_runner(bundle, model)
    numbers = {str(source.name): number for number, group in enumerate(groups) for source in group.sources}
    usual = [(0, ids) for ids in texts.ids]
    rare = [*((0, ids) for ids in texts.rare), *texts.behind_padding]
    of_rare = _RARE_SHARE / (1 - _RARE_SHARE) * _tokens(usual) / max(_tokens(rare), 1)
    first = [(ids, 1.0) for ids in texts.ids[::_EVERY_SEEN_FIRST]]
    first += [(ids, of_rare) for ids in texts.rare[::_EVERY_SEEN_FIRST]]
    splittable = [name for name, number in numbers.items() if groups[number].may_split]
    _choose_splits(groups, numbers, [(run(splittable, ids), weight) for ids, weight in first])
    statistics: dict[int, Statistics] = {}
    for weight, kind in ((1.0, usual), (of_rare, rare)):
        for together in _together(kind):
            parts: dict[int, list[FloatArray]] = {}
            for padding, ids in together:
                for name, activation in run(list(numbers), ids, padding=padding).items():
                    parts.setdefault(numbers[name], []).extend(_rows(activation, padding, len(ids)))
            for number, rows in parts.items():
                split = groups[number].split
                activation = np.concatenate(rows)
                if split:
                    activation = split.of_activation(activation)
                statistics.setdefault(number, Statistics.empty(activation.shape[-1])).add(activation, weight=weight)
            did(_tokens(together))
    return [statistics[number] for number in range(len(groups))]


_Padded = tuple[int, IntArray]


def _tokens(texts: Sequence[_Padded]) -> int:
    return sum(len(ids) for _, ids in texts)


def _together(texts: Sequence[_Padded]) -> Iterator[list[_Padded]]:
    """Texts, until they have so many tokens that their activations are worth counting."""
    together: list[_Padded] = []
    for text in texts:
        together.append(text)
        if _tokens(together) >= _TOGETHER:
            yield together
            together = []
    if together:
        yield together


def _rows(activation: FloatArray, padding: int, tokens: int) -> list[FloatArray]:
    """[tokens, channels], without padding; none of an activation in which padding has no place of its own."""
    if padding:
        if activation.shape[:-1] != (1, padding + tokens):
            return []
        activation = activation[:, padding:]
    return [activation.reshape(-1, activation.shape[-1])]


def _choose_splits(
    groups: Sequence[_Group],
    numbers: Mapping[str, int],
    seen: Sequence[tuple[Mapping[str, FloatArray], float]],
) -> None:
    for number, group in enumerate(groups):
        if group.may_split:
            names = [name for name in numbers if numbers[name] == number]
            parts = [(each[name].reshape(-1, each[name].shape[-1]), weight) for each, weight in seen for name in names]
            shares = np.concatenate([np.full(len(rows), weight) for rows, weight in parts])
            rows = np.concatenate([rows for rows, _ in parts])
            group.split = chosen_split(rows, shares / shares.sum(), list(group.weights.values()))
