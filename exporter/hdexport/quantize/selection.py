"""The products of an int8 graph that are left float, chosen by their changes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hdexport.graph.bundle_graph import read_portable_graph
from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from hdexport.quantize.calibration import CalibratedProduct
from hdexport.quantize.products import WeightProduct, weight_products
from hdexport.quantize.texts import tokens_in_memory
from hdexport.support.progress import Progress
from hdexport.verify.comparison import SCORES, compare_output
from hdexport.verify.single_texts import single_text_runner
from hdruntime.arrays import FloatArray, IntArray, WideArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import Bundle

if TYPE_CHECKING:
    import onnx_ir

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
"""Tokens of the longest checked texts that a product alone is measured with. In long texts other products make the
worst tokens than in short ones: keys of the first layers."""

_RUN_TOKENS = 65_536
"""Most tokens of these runs, for all products together: a model of many layers would take an hour."""

_POWER = 4
"""Power of a vector's loss in a product's loss. Most weights are left float for the worst tokens, in which products of
the last layers, which lose as much on average, have no part."""


def float_graph(bundle: Bundle) -> onnx_ir.Model:
    """The portable graph in float32, as ONNX Runtime runs it; nothing of it is in chunks."""
    return lower_for_onnxruntime_cpu(read_portable_graph(bundle))


def kept_float(
    bundle: Bundle,
    products: Mapping[str, CalibratedProduct],
    texts: Sequence[IntArray],
    progress: Progress,
) -> tuple[set[str], float]:
    """The weights of products that are left float, and the worst cosine of texts' answers then. The texts, [tokens]
    each, are none of the calibration's."""
    graph = SwitchedGraph(bundle, float_graph(bundle), products)
    exact = graph.answers((), texts)
    order = list(range(len(texts)))

    def judged(kept: Sequence[str], *, is_last: bool) -> tuple[bool, dict[int, float]]:
        """Whether all texts are near enough without those int8 products, and by number their cosines to exact answers.

        Texts after the first that does not hold are left out.
        """
        used = [name for name in products if name not in kept]
        cosines: dict[int, float] = {}
        holds = True
        for place, number in enumerate(order):
            (answers,) = graph.answers(used, [texts[number]])
            cosines[number] = _cosine(exact[number][-1], answers[-1])
            asked = _LEAST_COSINE if len(texts[number]) >= _FEW_TOKENS else _LEAST_TOKEN_COSINE
            if cosines[number] < asked or not _tokens_hold(bundle, answers, exact[number]):
                holds = False
                logger.info("int8 with %d float: a text of %d tokens does not hold", len(kept), len(texts[number]))
                if not is_last:
                    order.insert(0, order.pop(place))  # The text that fails first tells soonest.
                    break
        return holds, cosines

    kept: Sequence[str] = ()
    holds, cosines = judged(kept, is_last=False)
    if not holds:
        stages = _stages(_by_loss(graph, products, texts, tokens_in_memory(bundle)), products) or [()]
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
    """A bundle's float graph in ONNX Runtime, which is changed; each of its products is float, or computes as its int8
    form would, by a choice per run. Rounded values are multiplied in float32, because which products are left float
    must not depend on the kernels of the processor on which a bundle is built."""

    def __init__(self, bundle: Bundle, model: onnx_ir.Model, products: Mapping[str, CalibratedProduct]) -> None:
        self._names = [spec.name for spec in bundle.manifest.answers]
        self._switches = {name: _add_switch(model, name) for name in products}
        for product in weight_products(model):
            if product.weight in products:
                _replace(model, product, products[product.weight], self._switches[product.weight])
        self._run = single_text_runner(bundle, model)

    def answers(self, used: Collection[str], texts: Sequence[IntArray]) -> list[list[FloatArray]]:
        """All answers to each text, [tokens], without the batch axis, where the products of the weights `used` are
        int8."""
        switches = {str(value.name): np.array(name in used) for name, value in self._switches.items()}
        found = []
        for text in texts:
            outputs = self._run(self._names, text, switches)
            found.append([outputs[name][0] for name in self._names])
        return found


def _stages(ranked: Sequence[str], products: Mapping[str, CalibratedProduct]) -> list[Sequence[str]]:
    """Longer and longer beginnings of a ranking, as far as float products are worth it."""
    every = sum(product.weight.values.size for product in products.values())
    stages: list[Sequence[str]] = []
    share = judged = 0.0
    for count, name in enumerate(ranked, 1):
        share += products[name].weight.values.size / every
        if share > _MOST_FLOAT:
            break
        if share - judged >= _STEP:
            stages.append(ranked[:count])
            judged = share
    return stages


def _by_loss(
    graph: SwitchedGraph, products: Mapping[str, CalibratedProduct], texts: Sequence[IntArray], most_tokens: int
) -> list[str]:
    """The weights, first those that change answers most, relative to their multiplications, when each alone is int8. A
    product's own error does not tell: answers hardly see the part of it that attention passes to the next product."""
    left, shown = min(_SHOWN_TOKENS, _RUN_TOKENS // len(products), most_tokens), []
    for text in sorted(texts, key=len, reverse=True):
        shown.append(text[:left])
        left -= len(shown[-1])
        if left <= 0:
            break
    exact = graph.answers((), shown)
    losses = {}
    for name, product in products.items():
        of_texts = zip(graph.answers([name], shown), exact, strict=True)
        of_answers = zip(*([_losses(*pair) for pair in zip(*each, strict=True)] for each in of_texts), strict=True)
        powers = [(np.concatenate(each) ** _POWER).mean() for each in of_answers]
        losses[name] = float(np.mean(np.array(powers) ** (1 / _POWER))) / product.weight.values.size
    return sorted(losses, key=lambda name: losses[name], reverse=True)


def _losses(found: FloatArray, exact: FloatArray) -> WideArray:
    """[vectors], over all axes but the last: the difference's square by the exact vector's square."""
    squares = np.maximum((exact.astype(np.float64) ** 2).sum(-1), np.finfo(np.float32).tiny)
    losses: WideArray = np.ravel(((found - exact) ** 2).sum(-1) / squares)
    return losses


def _tokens_hold(bundle: Bundle, found: Sequence[FloatArray], exact: Sequence[FloatArray]) -> bool:
    """Whether answers hold verification's tolerances, and vectors of tokens somewhat more."""
    for spec, actual, expected in zip(bundle.manifest.answers, found, exact, strict=True):
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


def _add_switch(model: onnx_ir.Model, name: str) -> onnx_ir.Value:
    import onnx_ir as ir

    switch = ir.Value(name=f"{name}.is_int8", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    model.graph.inputs.append(switch)
    return switch


def _replace(model: onnx_ir.Model, product: WeightProduct, rounded: CalibratedProduct, switch: onnx_ir.Value) -> None:
    import onnx_ir as ir

    node, activation = product.node, rounded.activation
    result = node.outputs[0]

    def constant(name: str, array: Any) -> onnx_ir.Value:
        tensor = ir.tensor(np.asarray(array), name=f"{result.name}.{name}")
        value = ir.Value(name=tensor.name, const_value=tensor)
        model.graph.initializers[str(value.name)] = value
        return value

    source = product.source
    nodes = []
    if activation.split is not None:
        nodes.append(ir.node("Gather", [source, constant("sources", activation.split.sources)], {"axis": -1}))
        source = nodes[-1].outputs[0]
    nodes.append(ir.node("Mul", [source, constant("factor", activation.factor)]))
    nodes.append(ir.node("Add", [nodes[-1].outputs[0], constant("offset", activation.offset)]))
    nodes.append(
        ir.node("QuantizeLinear", [*nodes[-1].outputs, constant("one", np.float32(1)), constant("zero", np.uint8(0))])
    )
    nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": ir.DataType.FLOAT}))
    weight = rounded.weight.values.astype(np.float32) * rounded.weight.scale
    nodes.append(ir.node("MatMul", [nodes[-1].outputs[0], constant("weight", weight)]))
    nodes.append(ir.node("Add", [nodes[-1].outputs[0], constant("bias", rounded.weight.bias)]))
    exact = ir.node("MatMul", list(node.inputs))
    branches = {
        "then_branch": _branch(f"{result.name}.int8", nodes),
        "else_branch": _branch(f"{result.name}.float", [exact]),
    }
    switched = ir.node("If", [switch], branches)
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [switched], node.outputs, switched.outputs)


def _branch(name: str, nodes: Sequence[onnx_ir.Node]) -> onnx_ir.Graph:
    import onnx_ir as ir

    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{name}_{number}"
    output = nodes[-1].outputs[0]
    output.dtype = ir.DataType.FLOAT
    return ir.Graph(inputs=[], outputs=[output], nodes=nodes, name=name)
