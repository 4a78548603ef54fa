"""Gives a bundle int8 graphs beside its float ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.targets.registry import targets
from hdexport.quantize import Int8Options
from hdexport.quantize.calibration import CalibratedProduct, calibrate
from hdexport.quantize.insert import quantize_products
from hdexport.quantize.selection import float_graph, kept_float
from hdexport.quantize.texts import calibration_texts
from hdexport.support.bundle_writer import seal
from hdexport.support.progress import Progress
from hdruntime.bundle.manifest import GraphFile, Int8Calibration, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

_WEIGHTS_FILE = "int8.onnx.data"

_ALIGNMENT = 64
"""Bytes; the place of a weight in the file is a multiple."""


def quantize_bundle(bundle: Bundle, options: Int8Options, progress: Progress | None = None) -> Manifest:
    """Writes int8 graphs into a sealed bundle, for each lowering for CPUs that it has, and seals it again. The result
    is the manifest with the graphs and the facts of their calibration."""
    progress = progress or Progress()
    progress.step("Calibrating int8")
    texts = calibration_texts(bundle, options.calibrate)
    tokens = sum(map(len, texts.ids))
    to_run = tokens + sum(map(len, texts.rare)) + sum(len(ids) for _, ids in texts.behind_padding)
    done = 0

    def did(more: int) -> None:
        nonlocal done
        done += more
        progress.detail("calibrating", done, to_run)

    products = calibrate(bundle, float_graph(bundle), texts, did=did)
    if not products:
        raise ExportError(
            f"--int8 found no product with a weight in the layers of {bundle.manifest.model_type}.",
            hint="Build without --int8.",
        )
    kept, cosine = kept_float(bundle, products, texts.checked, progress)
    used = {name: product for name, product in products.items() if name not in kept}
    stored = _stored(used, bundle.path)
    lowerings = {lowering for target in targets() for lowering in target.rounded}
    written = [
        _write(bundle, graph, used, stored)
        for graph in bundle.manifest.graphs
        if graph.lowering in lowerings and graph.dtype != "int8"
    ]
    record = Int8Calibration(
        texts=texts.source,
        count=len(texts.ids),
        tokens=tokens,
        int8_weights=len(used),
        float_weights=tuple(sorted(kept)),
        min_cosine=cosine,
    )
    progress.result(
        f"int8: {len(used)} of {len(products)} weights, calibrated with {len(texts.ids)} texts, {texts.source}; "
        f"worst cosine of {len(texts.checked)} others {cosine:.4f}"
    )
    graphs = (*bundle.manifest.graphs, *written)
    return seal(bundle.path, dataclasses.replace(bundle.manifest, graphs=graphs, int8=record))


def _stored(products: Mapping[str, CalibratedProduct], directory: Path) -> dict[str, onnx_ir.ExternalTensor]:
    """Writes the int8 values to a file that all graphs read."""
    import onnx_ir as ir

    stored = {}
    with (directory / _WEIGHTS_FILE).open("wb") as file:
        for name, product in products.items():
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            values = product.weight.values
            stored[name] = ir.ExternalTensor(
                _WEIGHTS_FILE,
                file.tell(),
                values.nbytes,
                ir.DataType.INT8,
                shape=ir.Shape(values.shape),
                name=f"{name}.int8",
                base_dir=directory,
            )
            file.write(values.tobytes())
    return stored


def _write(
    bundle: Bundle,
    graph: GraphFile,
    products: Mapping[str, CalibratedProduct],
    stored: Mapping[str, onnx_ir.ExternalTensor],
) -> GraphFile:
    import onnx_ir as ir

    model = read_graph(bundle, graph)
    quantize_products(model, products, stored)
    file = f"{graph.lowering}_int8.onnx"
    ir.save(model, bundle.path / file)
    return GraphFile(file=file, lowering=graph.lowering, dtype="int8")
