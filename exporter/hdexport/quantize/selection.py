"""The products of an int8 graph that are left float, chosen by their changes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.graph.bundle_graph import read_portable_graph
from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from hdexport.quantize.calibration import CalibratedProduct
from hdexport.quantize.switches import SwitchedGraph
from hdexport.quantize.texts import tokens_in_memory
from hdexport.support.progress import Progress
from hdexport.verify.comparison import SCORES, compare_output
from hdruntime.arrays import FloatArray, IntArray
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
"""Part of the multiplications that are left float at most; more would not be worth a graph of their own."""

_STEP = 0.02
"""Part of the multiplications that are left float more, at least, before texts are judged again."""

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
    """The weights of products that are left float, and the worst cosine of texts' answers then.

    Args:
        bundle: with the float graphs.
        products: weight's name -> product.
        texts: [tokens] each, that nothing was calibrated with.
        progress: shows it.
    """
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
    """The weights, first the weights that change answers most, for their multiplications, when each is int8 alone.

    A product's own error does not tell: answers hardly see the part of it that attention passes to the next product.
    """
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


def _losses(found: FloatArray, exact: FloatArray) -> npt.NDArray[np.float64]:
    """[vectors], over all axes but the last: the difference's square by the exact vector's square."""
    squares = np.maximum((exact.astype(np.float64) ** 2).sum(-1), np.finfo(np.float32).tiny)
    losses: npt.NDArray[np.float64] = np.ravel(((found - exact) ** 2).sum(-1) / squares)
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
