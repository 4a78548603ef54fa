"""A bundle's graphs and engines on this machine, to be compared with PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import hdruntime
from hdexport.attention.kind import Decisions
from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.left_out_layers import (
    LayerResults,
    layer_results,
    leave_layers_out_of_graph,
    leave_layers_out_of_openvino,
)
from hdexport.graph.vocabulary_head import sampled_graph, sampled_openvino_model
from hdexport.verify.graph_sets import GraphSet
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.onnxruntime.sessions import open_session, session_options
from hdruntime.backends.openvino.runner import is_unpadded
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendError, BundleError, HdexportError
from hdruntime.optional import require

_PROVIDER = "CPUExecutionProvider"


Run = Callable[[Mapping[str, IntArray]], dict[str, FloatArray]]
"""Inputs by name, all of the graph's -> outputs by name."""


@contextlib.contextmanager
def runner(
    bundle: Bundle,
    graphs: GraphSet,
    decisions: Decisions | None,
    layers: LayerResults | None,
    *,
    is_sampled: bool,
) -> Iterator[Run | None]:
    """Runs lowered graphs and engines through the runtime, as users do, and the portable graph as it is. A graph that
    cannot be loaded raises its error in every run, so that each case has a reason.

    A graph whose decisions are asked for gives them as further outputs, and runs as it is, outside of the runtime. So
    do a graph without its repeated layers and a sampled one: their padding is not cut off. Sampled graphs compute
    logits at the tokens of the input `SAMPLED_TOKENS`, [samples]; where their last projection is not found, and on a
    GPU, None is yielded.

    The threads of ONNX Runtime do not spin while they wait: that would keep the cores from PyTorch, which runs between
    two cases.
    """
    if graphs.backend is not None:
        if is_sampled:
            yield None
            return
        try:
            session = hdruntime.load(graphs.alone(bundle), graphs.backend)
        except (BackendError, BundleError) as error:
            yield functools.partial(_refused, error)
            return
        with session:
            yield lambda feeds: session(**feeds)
        return
    graph = graphs.graphs[0]
    if is_sampled or decisions is not None or layers is not None:
        changed_run = _changed_openvino_run if graphs.is_for_openvino else _changed_run
        yield changed_run(bundle, graphs, decisions, layers, is_sampled)
        return
    if graphs.lowering == PORTABLE_LOWERING:
        yield _plain_run(
            open_session(bundle, graph, session_options(None, spinning=False), providers=[(_PROVIDER, {})])
        )
        return
    if graphs.is_for_openvino:
        with hdruntime.load(bundle, Backend.OPENVINO, precision=graphs.precision) as session:
            yield lambda feeds: session(**feeds)
        return
    # As `hdruntime.load` opens it, without the spinning.
    opened = OnnxRuntimeRunner(bundle, spinning=False, precision=graphs.precision)
    with hdruntime.Session(bundle, opened) as session:
        yield lambda feeds: session(**feeds)


def _refused(error: HdexportError, feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
    raise error


def repeated_layers(bundle: Bundle, sets: Sequence[GraphSet]) -> LayerResults | None:
    """The layer results of a bundle's graphs; None where no layer repeats another, or a graph has lost the names."""
    found = layer_results(read_graph(bundle, bundle.manifest.graphs[0]))
    if found is None or not all(_without_repeated(bundle, each, found) for each in sets):
        return None
    return found


def _without_repeated(bundle: Bundle, graphs: GraphSet, layers: LayerResults) -> bool:
    if graphs.is_for_openvino:
        core = require("openvino").Core()
        models = [core.read_model(bundle.file(graph.file)) for graph in graphs.graphs]
        return all(leave_layers_out_of_openvino(model, layers) for model in models)
    return leave_layers_out_of_graph(read_graph(bundle, graphs.graphs[0]), layers)


def _changed_run(
    bundle: Bundle, graphs: GraphSet, decisions: Decisions | None, layers: LayerResults | None, is_sampled: bool
) -> Run | None:
    """Runs a changed graph, whose weights are in the bundle's files, in ONNX Runtime."""
    import onnx_ir as ir
    import onnxruntime

    model = read_graph(bundle, graphs.graphs[0])
    if layers is not None:
        leave_layers_out_of_graph(model, layers)
    if decisions is not None:
        decisions.watch(model)
    if is_sampled and not sampled_graph(model, bundle.manifest.outputs[0].name, bundle.manifest.vocab_size):
        return None
    options = session_options(None, spinning=False)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    content = ir.to_proto(model).SerializeToString()
    return _plain_run(onnxruntime.InferenceSession(content, options, providers=[_PROVIDER]))


def _changed_openvino_run(
    bundle: Bundle, graphs: GraphSet, decisions: Decisions | None, layers: LayerResults | None, is_sampled: bool
) -> Run | None:
    """Runs the first graph, or, in batches without padding, the last, in OpenVINO and nothing of the runtime. The
    graphs are changed in OpenVINO, not as ONNX, because OpenVINO wants the weights in the directory of the graph."""
    manifest, core = bundle.manifest, require("openvino").Core()
    models = [core.read_model(bundle.file(graph.file)) for graph in graphs.graphs]
    for model in models:
        if layers is not None:
            leave_layers_out_of_openvino(model, layers)
        if decisions is not None:
            decisions.watch_openvino(model)
        if is_sampled and not sampled_openvino_model(model, manifest.outputs[0].name, manifest.vocab_size):
            return None
    hint = {"INFERENCE_PRECISION_HINT": "bf16" if graphs.precision is Precision.BFLOAT16 else "f32"}
    compiled = [core.compile_model(model, "CPU", hint) for model in models]

    def run(feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        chosen = compiled[-1 if is_unpadded(manifest, feeds) else 0]
        names = {name for value in chosen.inputs for name in value.names}
        found = chosen.create_infer_request().infer({name: array for name, array in feeds.items() if name in names})
        # The results are in memory of the request.
        return {name: np.array(found[value]) for value in chosen.outputs for name in value.get_names()}

    return run


def _plain_run(session: Any) -> Run:
    outputs = [value.name for value in session.get_outputs()]
    return lambda feeds: dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))
