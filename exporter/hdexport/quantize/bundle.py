"""Give a bundle int8 graphs beside its float ones."""

from __future__ import annotations

__all__ = ["quantize_bundle"]

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from hdexport.quantize.calibration import CalibratedProduct, calibrate
from hdexport.quantize.insert import StoredProduct, quantize_products
from hdexport.quantize.options import Int8Options
from hdexport.quantize.texts import calibration_texts
from hdexport.support.progress import Progress
from hdexport.verify.comparison import SCORES, compare_output
from hdexport.verify.single_texts import single_text_runner
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import GraphFile, Int8Calibration, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.writer import seal
from hdruntime.constants import CPU_LOWERING, OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING, PORTABLE_LOWERING
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

logger = logging.getLogger(__name__)

_WEIGHTS_FILE = "int8.onnx.data"
_LOWERINGS = (CPU_LOWERING, OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING)

_ALIGNMENT = 64
"""Bytes; the place of a weight in the file is a multiple."""

_LEAST_COSINE = 0.999
"""Of the worst text's answers to the float graph's. While it is less, the weight with the largest rounding errors is
left float. Texts of another kind than the calibration's lose about twice as much: 0.998 is what they should reach."""

_LEAST_TOKEN_COSINE = 0.9965
"""Likewise of the worst token's vector, which verification holds to 0.995: sessions in OpenVINO round the rest, too."""

_CHECK_EVERY = 4
"""Every so many texts are not calibrated with but checked."""

_MOST_FLOAT = 0.25
"""Part of the products that are left float at most; more would not be worth a graph of their own."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def quantize_bundle(bundle: Bundle, options: Int8Options, progress: Progress | None = None) -> Manifest:
    """Write int8 graphs into a bundle, for each lowering for CPUs that it has, and seal it.

    Args:
        bundle: sealed, with its float graphs; its directory is written to.
        options: what to calibrate with.
        progress: what shows it.

    Returns:
        The manifest with the graphs, and with what they were calibrated with.

    Raises:
        InputError: the texts cannot be read.
        ExportError: the model has no product with a weight in its layers.
    """
    progress = progress or Progress()
    progress.step("Calibrating int8")
    texts = calibration_texts(bundle, options.calibrate)
    checked = texts.ids[_CHECK_EVERY - 1 :: _CHECK_EVERY] or texts.ids
    calibrated_with = [ids for number, ids in enumerate(texts.ids) if number % _CHECK_EVERY != _CHECK_EVERY - 1]
    tokens = sum(map(len, calibrated_with))
    done = 0

    def did(more: int) -> None:
        nonlocal done
        done += more
        progress.detail("calibrating", done, tokens)

    products = calibrate(bundle, _float_graph(bundle), calibrated_with, did=did)
    if not products:
        raise ExportError(
            f"--int8 found no product with a weight in the layers of {bundle.manifest.model_type}.\n"
            "Build without --int8."
        )
    stored = _stored(products, bundle.path)
    kept, cosine = _kept_float(bundle, products, stored, checked, progress)
    used = {name: each for name, each in stored.items() if name not in kept}
    written = [
        _write(bundle, graph, used)
        for graph in bundle.manifest.graphs
        if graph.lowering in _LOWERINGS and graph.dtype != "int8"
    ]
    record = Int8Calibration(
        texts=texts.source,
        count=len(calibrated_with),
        tokens=tokens,
        products=len(used),
        kept_float=tuple(sorted(kept)),
        worst_cosine=cosine,
    )
    progress.result(
        f"int8: {len(used)} of {len(products)} weights, calibrated with {len(calibrated_with)} texts, {texts.source}; "
        f"worst cosine of {len(checked)} others {cosine:.4f}"
    )
    graphs = (*bundle.manifest.graphs, *written)
    return seal(bundle.path, dataclasses.replace(bundle.manifest, graphs=graphs, int8=record))


def _float_graph(bundle: Bundle) -> onnx_ir.Model:
    """The portable graph in float32, as ONNX Runtime runs it; nothing of it is in chunks."""
    graph = next(graph for graph in bundle.manifest.graphs if graph.lowering == PORTABLE_LOWERING)
    return lower_for_onnxruntime_cpu(read_graph(bundle, graph))


def _stored(products: Mapping[str, CalibratedProduct], directory: Path) -> dict[str, StoredProduct]:
    """Write the int8 values to a file that all graphs read."""
    import onnx_ir as ir

    stored = {}
    with (directory / _WEIGHTS_FILE).open("wb") as file:
        for name, product in products.items():
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            values = product.weight.values
            tensor = ir.ExternalTensor(
                _WEIGHTS_FILE,
                file.tell(),
                values.nbytes,
                ir.DataType.INT8,
                shape=ir.Shape(values.shape),
                name=f"{name}.int8",
                base_dir=directory,
            )
            file.write(values.tobytes())
            stored[name] = StoredProduct(
                activation=product.activation, values=tensor, scale=product.weight.scale, bias=product.weight.bias
            )
    return stored


def _kept_float(
    bundle: Bundle,
    products: Mapping[str, CalibratedProduct],
    stored: Mapping[str, StoredProduct],
    texts: Sequence[IntArray],
    progress: Progress,
) -> tuple[set[str], float]:
    """The weights that are left float, and the worst cosine then."""
    by_error = sorted(products, key=lambda name: products[name].weight.error, reverse=True)
    exact = _answers(bundle, _float_graph(bundle), texts)
    kept: set[str] = set()
    while True:
        model = _float_graph(bundle)
        quantize_products(model, {name: stored[name] for name in stored if name not in kept}, scales_of_channels=True)
        answers = _answers(bundle, model, texts)
        cosine = min(_cosine(first[-1], second[-1]) for first, second in zip(exact, answers, strict=True))
        tokens_hold = all(_tokens_hold(bundle, *pair) for pair in zip(answers, exact, strict=True))
        if (cosine >= _LEAST_COSINE and tokens_hold) or len(kept) >= int(_MOST_FLOAT * len(products)):
            break
        logger.info("int8: worst cosine %.5f; %s is left float", cosine, by_error[len(kept)])
        kept.add(by_error[len(kept)])
        progress.detail("leaving products float", len(kept), int(_MOST_FLOAT * len(products)))
    if cosine < _LEAST_COSINE:
        logger.warning(
            "The int8 graphs' worst cosine to float32 is %.4f, on texts that were not calibrated with, although %d "
            "weights are left float: measure with your own texts before you rely on them.",
            cosine,
            len(kept),
        )
    return kept, cosine


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


def _write(bundle: Bundle, graph: GraphFile, stored: Mapping[str, StoredProduct]) -> GraphFile:
    import onnx_ir as ir

    model = read_graph(bundle, graph)
    quantize_products(model, stored, scales_of_channels=graph.lowering == CPU_LOWERING)
    file = f"{graph.lowering}_int8.onnx"
    ir.save(model, bundle.path / file)
    return GraphFile(file=file, lowering=graph.lowering, dtype="int8")
