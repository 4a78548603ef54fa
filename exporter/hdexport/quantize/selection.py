"""Which products of an int8 graph are left float, by what each changes in the answers."""

from __future__ import annotations

__all__ = ["float_graph", "kept_float"]

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from hdexport.quantize.calibration import CalibratedProduct
from hdexport.quantize.switches import SwitchedGraph
from hdexport.support.progress import Progress
from hdexport.verify.comparison import SCORES, compare_output
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING

if TYPE_CHECKING:
    import onnx_ir

logger = logging.getLogger(__name__)

_LEAST_COSINE = 0.999
"""Of the worst text's answers to the float graph's. While it is less, the weight that changes answers most is left
float. Texts of another kind than the calibration's lose about twice as much: 0.998 is what they should reach."""

_WARNED_COSINE = 0.998
"""Below it a user is told."""

_LEAST_TOKEN_COSINE = 0.9965
"""Likewise of the worst token's vector, which verification holds to 0.995: sessions in OpenVINO round the rest, too."""

_MOST_FLOAT = 0.25
"""Part of the products that are left float at most; more would not be worth a graph of their own."""

_SHOWN_ALONE = 5
"""Checked texts, short ones and long ones, that a product alone is measured with."""

_SHOWN_TOKENS = 64
"""Of each of them."""

_AROUND_TOKENS = 512
"""At most, of a text with a token whose vector is far from the exact one."""

_WORTH_FLOAT = 0.8
"""What may be left of the loss when one more weight is left float; a weight that helps less stays int8."""

_CANDIDATES = 3
"""Weights that a token's vector is computed without, one by one."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def float_graph(bundle: Bundle) -> onnx_ir.Model:
    """The portable graph in float32, as ONNX Runtime runs it; nothing of it is in chunks."""
    graph = next(graph for graph in bundle.manifest.graphs if graph.lowering == PORTABLE_LOWERING)
    return lower_for_onnxruntime_cpu(read_graph(bundle, graph))


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
        progress: what shows it.
    """
    graph = SwitchedGraph(bundle, float_graph(bundle), products)
    exact = graph.answers((), texts)
    most = int(_MOST_FLOAT * len(products))
    by_loss: list[str] = []
    alone: dict[tuple[int, int], list[str]] = {}
    kept: set[str] = set()
    answers_of_all = graph.answers(list(products), texts)
    cosines = np.array([_cosine(first[-1], second[-1]) for first, second in zip(exact, answers_of_all, strict=True)])
    order = [int(number) for number in np.argsort(cosines)]  # the worst first
    place, hold_tokens = 0, False
    while place < len(order) or not hold_tokens:
        if place == len(order):  # Every text's own vector holds: what made it do so helps tokens most, too.
            place, hold_tokens = 0, True
        number = order[place]
        used = [name for name in products if name not in kept]
        (answers,) = graph.answers(used, [texts[number]])
        cosine = cosines[number] = _cosine(exact[number][-1], answers[-1])
        holds = cosine >= _LEAST_COSINE and (not hold_tokens or _tokens_hold(bundle, answers, exact[number]))
        if holds or len(kept) >= most:
            place += 1
            continue
        by_loss = by_loss or _by_loss(graph, products, texts)
        weakest = _weakest_token(bundle, [answers], [exact[number]]) if cosine >= _LEAST_COSINE else None
        key = number, -1 if weakest is None else weakest.token
        if weakest is not None and key not in alone:
            alone[key] = _by_loss_of_token(graph, products, texts[number], weakest)
        ranked = (by_loss, alone.get(key, []))
        candidates = [name for names in ranked for name in _first(names, used, _CANDIDATES)]
        costly, left = _costliest_of_text(graph, used, candidates, texts[number], exact[number], weakest)
        if left > _WORTH_FLOAT * _loss(answers, exact[number], weakest):
            logger.info("int8: cosine %.5f, weakest token %s: no weight alone is the cause", cosine, weakest)
            place += 1
            continue
        logger.info("int8: cosine %.5f, weakest token %s; %s is left float", cosine, weakest, costly)
        kept.add(costly)
        progress.detail("leaving products float", len(kept), most)
        # All are run again, the one that asked for a change first: others are likely to be well where it is.
        order.insert(0, order.pop(place))
        place = 0
    cosine = float(cosines.min())
    if cosine < _WARNED_COSINE:
        logger.warning(
            "The int8 graphs' worst cosine to float32 is %.4f, on texts that were not calibrated with, although %d "
            "weights are left float: measure with your own texts before you rely on them.",
            cosine,
            len(kept),
        )
    return kept, cosine


def _by_loss(graph: SwitchedGraph, products: Mapping[str, CalibratedProduct], texts: Sequence[IntArray]) -> list[str]:
    """The weights that change answers most when each is int8 alone, the first first.

    A product's own error does not tell: answers hardly see that of what attention gives to the following product.
    """
    shown = [text[:_SHOWN_TOKENS] for text in sorted(texts, key=len)[:: max(1, len(texts) // _SHOWN_ALONE)]]
    exact = graph.answers((), shown)
    by_error = sorted(products, key=lambda name: products[name].weight.error, reverse=True)
    losses = {}
    for name in by_error[: len(by_error) // 2]:
        answers = graph.answers([name], shown)
        pairs = [pair for each in zip(answers, exact, strict=True) for pair in zip(*each, strict=True)]
        losses[name] = float(np.mean([_loss_of_vectors(*pair) for pair in pairs]))
    return sorted(losses, key=lambda name: losses[name], reverse=True)


@dataclass(frozen=True)
class _Token:
    """A token's vector among answers.

    Attributes:
        cosine: to the exact vector.
        text: its number.
        answer: the number of the answer that has the vector.
        token: its number.
    """

    cosine: float
    text: int
    answer: int
    token: int


def _weakest_token(
    bundle: Bundle, answers: Sequence[Sequence[FloatArray]], exact: Sequence[Sequence[FloatArray]]
) -> _Token | None:
    """The token's vector with the least cosine; None where no answer has vectors of tokens."""
    weakest = []
    for number, spec in enumerate(bundle.manifest.answers):
        if spec.has_tokens_axis and spec.name not in SCORES:
            for text, (found, expected) in enumerate(zip(answers, exact, strict=True)):
                first, second = found[number].astype(np.float64), expected[number].astype(np.float64)
                norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
                cosines = (first * second).sum(-1) / np.maximum(norms, np.finfo(np.float32).tiny)
                token = int(cosines.argmin())
                weakest.append(_Token(float(cosines[token]), text, number, token))
    return min(weakest, key=lambda each: each.cosine, default=None)


def _first(names: Sequence[str], among: Collection[str], count: int) -> list[str]:
    return [name for name in names if name in among][:count]


def _by_loss_of_token(graph: SwitchedGraph, names: Collection[str], text: IntArray, weakest: _Token) -> list[str]:
    """As `_by_loss`, of a token's vector, in its text: alone it may attend to other tokens."""
    begin = max(0, min(weakest.token - _AROUND_TOKENS // 2, len(text) - _AROUND_TOKENS))
    token = dataclasses.replace(weakest, token=weakest.token - begin)
    around = [text[begin : begin + _AROUND_TOKENS]]
    (exact,) = graph.answers((), around)
    losses = {name: _loss(graph.answers([name], around)[0], exact, token) for name in names}
    return sorted(losses, key=lambda name: losses[name], reverse=True)


def _costliest_of_text(
    graph: SwitchedGraph,
    used: Collection[str],
    candidates: Sequence[str],
    text: IntArray,
    exact: Sequence[FloatArray],
    weakest: _Token | None,
) -> tuple[str, float]:
    """Without whose rounding a text's answer, or a token's vector, is nearest to the exact one, and its loss then.

    What each changes alone does not tell: the changes of several turn attention to another token.
    """

    def loss_without(left: str) -> float:
        (answers,) = graph.answers([name for name in used if name != left], [text])
        return _loss(answers, exact, weakest)

    losses = {name: loss_without(name) for name in candidates}
    costly = min(losses, key=losses.__getitem__)
    return costly, losses[costly]


def _loss(answers: Sequence[FloatArray], exact: Sequence[FloatArray], weakest: _Token | None) -> float:
    """Of a text's last answer, or of a token's vector."""
    if weakest is None:
        return 1 - _cosine(exact[-1], answers[-1])
    return _loss_of_vectors(*(each[weakest.answer][weakest.token] for each in (answers, exact)))


def _loss_of_vectors(found: FloatArray, exact: FloatArray) -> float:
    """Mean, over all but the last axis, of what the vectors' squared difference is of the exact ones' square."""
    squares = np.maximum((exact.astype(np.float64) ** 2).sum(-1), np.finfo(np.float32).tiny)
    return float((((found - exact) ** 2).sum(-1) / squares).mean())


def _tokens_hold(bundle: Bundle, found: Sequence[FloatArray], exact: Sequence[FloatArray]) -> bool:
    """Whether answers hold what verification asks of them, and vectors of tokens somewhat more."""
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
    """Of an answer; of one with tokens, of its mean over them."""
    first, second = (array.reshape(-1, array.shape[-1]).mean(0) for array in (first, second))
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norms if norms else float(np.array_equal(first, second))
