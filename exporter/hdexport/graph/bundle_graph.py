"""Write and read the ONNX graphs of a bundle, and reject damaged graphs and graphs of another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hdruntime.bundle.graph_interface import Found, check_interface
from hdruntime.bundle.manifest import GraphDtype, GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BundleCorruptError
from hdruntime.optional import require

if TYPE_CHECKING:
    import onnx_ir


def write_graph(
    model: onnx_ir.Model, directory: Path, *, lowering: str, dtype: GraphDtype, name: str = ""
) -> GraphFile:
    """Write a graph, whose weights are in their files, as ``NAME.onnx``, by default named after the lowering."""
    import onnx_ir as ir

    file = f"{name or lowering}.onnx"
    ir.save(model, directory / file)
    return graph_file(model, file, lowering=lowering, dtype=dtype)


def graph_file(model: onnx_ir.Model, file: str, *, lowering: str, dtype: GraphDtype) -> GraphFile:
    """The manifest's record of a graph."""
    names = (f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph.all_nodes())
    return GraphFile(file=file, lowering=lowering, dtype=dtype, operators=dict(Counter(names).most_common()))


def read_graph(bundle: Bundle, graph: GraphFile, *, directory: Path | None = None) -> onnx_ir.Model:
    """Read a graph; its weights stay in their files until they are read.

    `directory` has a copy of the bundle's files, which is read instead; None for the bundle. A BundleCorruptError says
    that the file is no ONNX graph, or another model's graph.
    """
    require("onnx")
    ir = require("onnx_ir")
    path = bundle.file(graph.file) if directory is None else directory / graph.file
    try:
        model = cast("onnx_ir.Model", ir.load(path))
        inputs, outputs = _interface(model.graph.inputs), _interface(model.graph.outputs)
    except Exception as error:  # errors of protobuf, onnx and onnx_ir have no class in common
        raise BundleCorruptError(
            f"The graph {graph.file} of {bundle.path} cannot be read: {error}.", hint="Build the bundle again."
        ) from error
    check_interface(bundle, graph, inputs=inputs, outputs=outputs)
    return model


def read_portable_graph(bundle: Bundle, *, directory: Path | None = None) -> onnx_ir.Model:
    """Read the portable graph, from which all other graphs are lowered; see `read_graph`."""
    graph = next((graph for graph in bundle.manifest.graphs if graph.lowering == PORTABLE_LOWERING), None)
    if graph is None:
        raise BundleCorruptError(
            f"{bundle.path} has no portable graph, from which all other graphs are lowered.",
            hint="Build the bundle again.",
        )
    return read_graph(bundle, graph, directory=directory)


def _interface(values: Iterable[onnx_ir.Value]) -> Found:
    return {
        str(value.name): ("of no type" if value.dtype is None else str(value.dtype.numpy()), list(value.shape or ()))
        for value in values
    }
