"""Gives a bundle int8 graphs beside its float ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from hdexport.graph.bundle_graph import read_graph, write_graph
from hdexport.graph.targets.registry import targets
from hdexport.quantize import Int8Options
from hdexport.quantize.calibration import CalibratedMatMul, calibrate
from hdexport.quantize.dynamic import MIN_PARAMETERS, quantize_weights
from hdexport.quantize.insert import quantize_matmuls
from hdexport.quantize.selection import float_graph, kept_float
from hdexport.quantize.texts import calibration_texts
from hdexport.support.bundle_writer import seal
from hdexport.support.progress import Progress
from hdruntime.backends.openvino import OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING
from hdruntime.bundle.manifest import GraphFile, Int8Calibration, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import ExportError, InputError, Setting

_WEIGHTS_FILE = "int8.onnx.data"

_DYNAMIC_LOWERINGS = (OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING)
"""Lowerings of the runtime that quantizes activations while it runs."""

_ALIGNMENT = 64
"""Bytes; the place of a weight in the file is a multiple."""


def quantize_bundle(bundle: Bundle, options: Int8Options, progress: Progress | None = None) -> Manifest:
    """Writes int8 graphs into a sealed bundle, for each lowering for CPUs that it has, and seals it again. The result
    is the manifest with the graphs and the facts of their calibration.

    Weights of large models are quantized without calibration; see `hdexport.quantize.dynamic`."""
    progress = progress or Progress()
    if bundle.manifest.parameters >= MIN_PARAMETERS:
        return _without_calibration(bundle, options, progress)
    progress.step("Calibrating int8")
    texts = calibration_texts(bundle, options.calibrate)
    tokens = sum(map(len, texts.ids))
    to_run = tokens + sum(map(len, texts.rare)) + sum(len(ids) for _, ids in texts.behind_padding)
    done = 0

    def did(more: int) -> None:
        nonlocal done
        done += more
        progress.detail("calibrating", done, to_run)

    matmuls = calibrate(bundle, float_graph(bundle), texts, did=did)
    if not matmuls:
        raise ExportError(
            f"The layers of {bundle.manifest.model_type} have no matmul with a weight, so nothing can be int8.",
            hint=("Leave ", Setting("int8"), " out."),
        )
    kept, cosine = kept_float(bundle, matmuls, texts.checked, progress)
    used = {name: matmul for name, matmul in matmuls.items() if name not in kept}
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
        f"int8: {len(used)} of {len(matmuls)} weights, calibrated on {len(texts.ids)} sequences of {texts.source}; "
        f"min cosine on {len(texts.checked)} other sequences {cosine:.4f}"
    )
    graphs = (*bundle.manifest.graphs, *written)
    return seal(bundle.path, dataclasses.replace(bundle.manifest, graphs=graphs, int8=record))


def _without_calibration(bundle: Bundle, options: Int8Options, progress: Progress) -> Manifest:
    manifest = bundle.manifest
    if options.calibrate is not None:
        raise InputError(
            f"The weights of a model of {manifest.parameters:,} parameters are quantized without calibration, and ",
            Setting("calibrate", options.calibrate),
            " has no effect.",
            hint="Leave it out.",
        )
    graphs = [graph for graph in manifest.graphs if graph.lowering in _DYNAMIC_LOWERINGS and graph.dtype != "int8"]
    if not graphs:
        raise InputError(
            f"{manifest.name} has {manifest.parameters:,} parameters; int8 graphs of models of {MIN_PARAMETERS:,} or "
            "more are for OpenVINO.",
            hint=("Add ", Setting("targets", "openvino", command="build"), ", or leave out ", Setting("int8"), "."),
        )
    progress.step("Quantizing weights to int8")
    written, weights = quantize_weights(bundle, graphs, _WEIGHTS_FILE)
    progress.result(f"int8: {weights} weights, without calibration: OpenVINO quantizes activations while it runs")
    record = Int8Calibration(int8_weights=weights)
    return seal(bundle.path, dataclasses.replace(manifest, graphs=(*manifest.graphs, *written), int8=record))


def _stored(matmuls: Mapping[str, CalibratedMatMul], directory: Path) -> dict[str, ir.ExternalTensor]:
    """Writes the int8 values to a file that all graphs read."""
    stored = {}
    with (directory / _WEIGHTS_FILE).open("wb") as file:
        for name, matmul in matmuls.items():
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            values = matmul.weight.values
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
    matmuls: Mapping[str, CalibratedMatMul],
    stored: Mapping[str, ir.ExternalTensor],
) -> GraphFile:
    model = read_graph(bundle, graph)
    quantize_matmuls(model, matmuls, stored)
    name = f"{graph.lowering}_int8"
    return write_graph(model, bundle.path, lowering=graph.lowering, dtype="int8", name=name)
