"""Which products of an int8 graph are left float, by what each changes in the answers."""

from __future__ import annotations

__all__ = ["float_graph", "kept_float"]

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from hdexport.quantize.calibration import CalibratedProduct
from hdexport.quantize.insert import StoredProduct, quantize_products
from hdexport.support.progress import Progress
from hdexport.verify.comparison import SCORES, compare_output
from hdexport.verify.single_texts import single_text_runner
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING

if TYPE_CHECKING:
    import onnx_ir

logger = logging.getLogger(__name__)

_LEAST_COSINE = 0.999
"""Of the worst text's answers to the float graph's. While it is less, the weight that changes answers most is left
float. Texts of another kind than the calibration's lose about twice as much: 0.998 is what they should reach."""

_LEAST_TOKEN_COSINE = 0.9965
"""Likewise of the worst token's vector, which verification holds to 0.995: sessions in OpenVINO round the rest, too."""

_MOST_FLOAT = 0.25
"""Part of the products that are left float at most; more would not be worth a graph of their own."""

_SHOWN_ALONE = 5
"""Checked texts, short ones and long ones, that a product alone is measured with."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def float_graph(bundle: Bundle) -> onnx_ir.Model:
    """The portable graph in float32, as ONNX Runtime runs it; nothing of it is in chunks."""
    graph = next(graph for graph in bundle.manifest.graphs if graph.lowering == PORTABLE_LOWERING)
    return lower_for_onnxruntime_cpu(read_graph(bundle, graph))


def kept_float(
    bundle: Bundle,
    products: Mapping[str, CalibratedProduct],
    stored: Mapping[str, StoredProduct],
    texts: Sequence[IntArray],
    progress: Progress,
) -> tuple[set[str], float]:
    """The weights of products that are left float, and the worst cosine of texts' answers then.

    Args:
        bundle: with the float graphs.
        products: weight's name -> product.
        stored: the same, as graphs hold them.
        texts: [tokens] each, that nothing was calibrated with.
        progress: what shows it.
    """
    exact = _answers(bundle, float_graph(bundle), texts)
    most = int(_MOST_FLOAT * len(products))
    by_loss: list[str] = []
    kept: set[str] = set()
    while True:
        used = {name: stored[name] for name in stored if name not in kept}
        answers = _int8_answers(bundle, used, texts)
        cosine = min(_cosine(first[-1], second[-1]) for first, second in zip(exact, answers, strict=True))
        tokens_hold = all(_tokens_hold(bundle, *pair) for pair in zip(answers, exact, strict=True))
        if (cosine >= _LEAST_COSINE and tokens_hold) or len(kept) >= most:
            break
        weakest = _weakest_token(bundle, answers, exact)
        if cosine < _LEAST_COSINE or weakest is None:
            by_loss = by_loss or _by_loss(bundle, products, stored, texts, exact)
            costly = next(name for name in by_loss if name in used)
        else:
            costly = _costliest_of_token(bundle, used, texts, exact, weakest)
        logger.info("int8: worst cosine %.5f, weakest token %s; %s is left float", cosine, weakest, costly)
        kept.add(costly)
        progress.detail("leaving products float", len(kept), most)
    if cosine < _LEAST_COSINE:
        logger.warning(
            "The int8 graphs' worst cosine to float32 is %.4f, on texts that were not calibrated with, although %d "
            "weights are left float: measure with your own texts before you rely on them.",
            cosine,
            len(kept),
        )
    return kept, cosine


def _by_loss(
    bundle: Bundle,
    products: Mapping[str, CalibratedProduct],
    stored: Mapping[str, StoredProduct],
    texts: Sequence[IntArray],
    exact: Sequence[Sequence[FloatArray]],
) -> list[str]:
    """The weights that change answers most when each is int8 alone, the first first.

    A product's own error does not tell: answers hardly see that of what attention gives to the following product.
    """
    shown = sorted(range(len(texts)), key=lambda number: len(texts[number]))[:: max(1, len(texts) // _SHOWN_ALONE)]
    by_error = sorted(products, key=lambda name: products[name].weight.error, reverse=True)
    losses = {}
    for name in by_error[: len(by_error) // 2]:
        answers = _int8_answers(bundle, {name: stored[name]}, [texts[number] for number in shown])
        pairs = [
            pair
            for number, found in zip(shown, answers, strict=True)
            for pair in zip(found, exact[number], strict=True)
        ]
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


def _costliest_of_token(
    bundle: Bundle,
    stored: Mapping[str, StoredProduct],
    texts: Sequence[IntArray],
    exact: Sequence[Sequence[FloatArray]],
    weakest: _Token,
) -> str:
    """The weight that changes a token's vector most when it is int8 alone: one that clips a value, mostly."""

    def loss(name: str) -> float:
        (answers,) = _int8_answers(bundle, {name: stored[name]}, [texts[weakest.text]])
        vectors = (each[weakest.answer][weakest.token] for each in (answers, exact[weakest.text]))
        return _loss_of_vectors(*vectors)

    return max(stored, key=loss)


def _loss_of_vectors(found: FloatArray, exact: FloatArray) -> float:
    """Mean, over all but the last axis, of what the vectors' squared difference is of the exact ones' square."""
    squares = np.maximum((exact.astype(np.float64) ** 2).sum(-1), np.finfo(np.float32).tiny)
    return float((((found - exact) ** 2).sum(-1) / squares).mean())


def _int8_answers(
    bundle: Bundle, stored: Mapping[str, StoredProduct], texts: Collection[IntArray]
) -> list[list[FloatArray]]:
    """As `_answers`, of the graph with these products."""
    model = float_graph(bundle)
    quantize_products(model, stored, scales_of_channels=True)
    return _answers(bundle, model, texts)


def _answers(bundle: Bundle, model: onnx_ir.Model, texts: Collection[IntArray]) -> list[list[FloatArray]]:
    """Of each text, every answer without the batch axis."""
    run = single_text_runner(bundle, model)
    names = [spec.name for spec in bundle.manifest.answers]
    found = []
    for text in texts:
        outputs = run(names, text)
        found.append([outputs[name][0] for name in names])
    return found


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
