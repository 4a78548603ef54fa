"""The matmuls of an int8 graph that are left float, chosen by their changes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from hdexport.graph.bundle_graph import read_portable_graph
from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from hdexport.lowering.nodes import replace_result
from hdexport.quantize.calibration import CalibratedMatMul
from hdexport.quantize.matmuls import WeightMatMul, weight_matmuls
from hdexport.quantize.texts import tokens_in_memory
from hdexport.support.progress import Progress
from hdexport.verify.comparison import SCORES, compare_output
from hdexport.verify.single_texts import single_text_runner
from hdplugins.op_builder import OpBuilder, cond
from hdruntime.arrays import FloatArray, IntArray, WideArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import Bundle

logger = logging.getLogger(__name__)

_LEAST_COSINE = 0.999
"""Least cosine of the worst text's answers with the float graph's. Below it, more weights are left float. Other texts
lose more: they should reach 0.998."""

_WARNED_COSINE = 0.998
"""A user is told of a worst cosine below it."""

_LEAST_TOKEN_COSINE = 0.996
"""The same for the worst token's vector, which verification holds to 0.995: sessions in OpenVINO round the rest, too,
and another token is the worst then."""

_FEW_TOKENS = 16
"""Texts of fewer tokens are held to the bound for tokens: little cancels in the mean of so few."""

_MOST_FLOAT = 1 / 3
"""Most of the multiplications that may be left float; with more, a graph of its own would not be worth it."""

_STEP = 0.02
"""Least part of the multiplications that is added to those left float before texts are judged again."""

_SHOWN_TOKENS = 1024
"""Tokens of the longest checked texts that a matmul alone is measured with. In long texts other matmuls make the
worst tokens than in short ones: keys of the first layers."""

_RUN_TOKENS = 65_536
"""Most tokens of these runs, for all matmuls together: a model of many layers would take an hour."""

_POWER = 4
"""Power of a vector's loss in a matmul's loss. Most weights are left float for the worst tokens, in which matmuls of
the last layers, which lose as much on average, have no part."""


def float_graph(bundle: Bundle) -> ir.Model:
    """The portable graph in float32, as ONNX Runtime runs it; nothing of it is in chunks."""
    return lower_for_onnxruntime_cpu(read_portable_graph(bundle))


def kept_float(
    bundle: Bundle,
    matmuls: Mapping[str, CalibratedMatMul],
    texts: Sequence[IntArray],
    progress: Progress,
) -> tuple[set[str], float]:
    """The weights of matmuls that are left float, and the worst cosine of texts' answers then. The texts, [tokens]
    each, are none of the calibration's."""
    graph = SwitchedGraph(bundle, float_graph(bundle), matmuls)
    exact = graph.answers((), texts)
    order = list(range(len(texts)))

    def judged(kept: Sequence[str], *, is_last: bool) -> tuple[bool, dict[int, float]]:
        """Whether all texts are near enough without those int8 matmuls, and by number their cosines to exact answers.

        Texts after the first that does not hold are left out.
        """
        used = [name for name in matmuls if name not in kept]
        cosines: dict[int, float] = {}
        holds = True
        for place, number in enumerate(order):
            (answers,) = graph.answers(used, [texts[number]])
            cosines[number] = _cosine(exact[number][-1], answers[-1])
            least_cosine = _LEAST_COSINE if len(texts[number]) >= _FEW_TOKENS else _LEAST_TOKEN_COSINE
            if cosines[number] < least_cosine or not _tokens_hold(bundle, answers, exact[number]):
                holds = False
                logger.info("int8 with %d float: a text of %d tokens does not hold", len(kept), len(texts[number]))
                if not is_last:
                    order.insert(0, order.pop(place))  # The text that fails first tells soonest.
                    break
        return holds, cosines

    kept: Sequence[str] = ()
    holds, cosines = judged(kept, is_last=False)
    if not holds:
        stages = _stages(_by_loss(graph, matmuls, texts, tokens_in_memory(bundle)), matmuls) or [()]
        for number, kept in enumerate(stages, 1):
            holds, cosines = judged(kept, is_last=number == len(stages))
            if holds:
                break
    logger.info("int8: %d are left float: %s", len(kept), list(kept))
    cosine = min((cosines[number] for number in order if len(texts[number]) >= _FEW_TOKENS), default=1.0)
    if cosine < _WARNED_COSINE:
        logger.warning(
            "The int8 graphs' worst cosine to float32 is %.4f, on texts that were not calibrated with, although %d "
            "weights are left float: measure with your own texts before you rely on them.",
            cosine,
            len(kept),
        )
    return set(kept), min(cosines.values())


class SwitchedGraph:
    """A bundle's float graph in ONNX Runtime, which is changed; each of its matmuls is float, or computes as its int8
    form would, by a choice per run. Rounded values are multiplied in float32, because which matmuls are left float
    must not depend on the kernels of the processor on which a bundle is built."""

    def __init__(self, bundle: Bundle, model: ir.Model, matmuls: Mapping[str, CalibratedMatMul]) -> None:
        self._names = [spec.name for spec in bundle.manifest.result_outputs]
        self._switches = {name: _add_switch(model, name) for name in matmuls}
        for matmul in weight_matmuls(model):
            if matmul.weight in matmuls:
                _replace(model, matmul, matmuls[matmul.weight], self._switches[matmul.weight])
        self._run = single_text_runner(bundle, model)

    def answers(self, used: Collection[str], texts: Sequence[IntArray]) -> list[list[FloatArray]]:
        """All answers to each text, [tokens], without the batch axis, where the matmuls of the weights `used` are
        int8."""
        switches = {str(value.name): np.array(name in used) for name, value in self._switches.items()}
        outputs_of_texts = []
        for text in texts:
            outputs = self._run(self._names, text, switches)
            outputs_of_texts.append([outputs[name][0] for name in self._names])
        return outputs_of_texts


def _stages(ranked: Sequence[str], matmuls: Mapping[str, CalibratedMatMul]) -> list[Sequence[str]]:
    """Longer and longer beginnings of a ranking, as far as float matmuls are worth it."""
    every = sum(matmul.weight.values.size for matmul in matmuls.values())
    stages: list[Sequence[str]] = []
    share = judged = 0.0
    for count, name in enumerate(ranked, 1):
        share += matmuls[name].weight.values.size / every
        if share > _MOST_FLOAT:
            break
        if share - judged >= _STEP:
            stages.append(ranked[:count])
            judged = share
    return stages


def _by_loss(
    graph: SwitchedGraph, matmuls: Mapping[str, CalibratedMatMul], texts: Sequence[IntArray], most_tokens: int
) -> list[str]:
    """The weights, first those that change answers most, relative to their multiplications, when each alone is int8. A
    matmul's own error does not tell: answers hardly see the part of it that attention passes to the next matmul."""
    left, shown = min(_SHOWN_TOKENS, _RUN_TOKENS // len(matmuls), most_tokens), []
    for text in sorted(texts, key=len, reverse=True):
        shown.append(text[:left])
        left -= len(shown[-1])
        if left <= 0:
            break
    exact = graph.answers((), shown)
    losses = {}
    for name, matmul in matmuls.items():
        of_texts = zip(graph.answers([name], shown), exact, strict=True)
        of_answers = zip(*([_losses(*pair) for pair in zip(*each, strict=True)] for each in of_texts), strict=True)
        powers = [(np.concatenate(each) ** _POWER).mean() for each in of_answers]
        losses[name] = float(np.mean(np.array(powers) ** (1 / _POWER))) / matmul.weight.values.size
    return sorted(losses, key=lambda name: losses[name], reverse=True)


def _losses(actual: FloatArray, exact: FloatArray) -> WideArray:
    """[vectors], over all axes but the last: the difference's square by the exact vector's square."""
    squares = np.maximum((exact.astype(np.float64) ** 2).sum(-1), np.finfo(np.float32).tiny)
    return np.ravel(((actual - exact) ** 2).sum(-1) / squares)


def _tokens_hold(bundle: Bundle, outputs: Sequence[FloatArray], exact: Sequence[FloatArray]) -> bool:
    """Whether answers hold verification's tolerances, and vectors of tokens somewhat more."""
    for spec, actual, expected in zip(bundle.manifest.result_outputs, outputs, exact, strict=True):
        of_tokens = spec.has_tokens_axis
        compared = compare_output(
            spec.name, actual, expected, half_precision=False, precision=Precision.INT8, of_tokens=of_tokens
        )
        if not compared.passed:
            return False
        if of_tokens and spec.name not in SCORES and compared.min_cosine < _LEAST_TOKEN_COSINE:
            return False
    return True


def _cosine(first: FloatArray, second: FloatArray) -> float:
    """Cosine of two answers; of answers with tokens, the cosine of their means over tokens."""
    first, second = (array.reshape(-1, array.shape[-1]).mean(0) for array in (first, second))
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norms if norms else float(np.array_equal(first, second))


def _add_switch(model: ir.Model, name: str) -> ir.Value:
    switch = ir.Value(name=f"{name}.is_int8", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    model.graph.inputs.append(switch)
    return switch


def _replace(model: ir.Model, matmul: WeightMatMul, rounded: CalibratedMatMul, switch: ir.Value) -> None:
    node, activation = matmul.node, rounded.activation
    result = node.outputs[0]

    def constant(name: str, array: Any) -> ir.Value:
        tensor = ir.tensor(np.asarray(array), name=f"{result.name}.{name}")
        value = ir.Value(name=tensor.name, const_value=tensor)
        model.graph.initializers[str(value.name)] = value
        return value

    def as_int8(op: OpBuilder) -> ir.Value:
        source = matmul.source
        if activation.split is not None:
            source = op.Gather(source, constant("sources", activation.split.sources), axis=-1)
        shifted = op.Add(op.Mul(source, constant("factor", activation.factor)), constant("offset", activation.offset))
        levels = op.QuantizeLinear(shifted, constant("one", np.float32(1)), constant("zero", np.uint8(0)))
        weight = rounded.weight.values.astype(np.float32) * rounded.weight.scale
        multiplied = op.MatMul(op.Cast(levels, to=ir.DataType.FLOAT), constant("weight", weight))
        return op.Add(multiplied, constant("bias", rounded.weight.bias))

    def as_float(op: OpBuilder) -> ir.Value:
        return op.MatMul(*node.inputs)

    op, name = OpBuilder.before(node), f"{result.name}.int8"
    replace_result(node, cond(op, switch, as_int8, as_float, name=name, dtype=ir.DataType.FLOAT))
