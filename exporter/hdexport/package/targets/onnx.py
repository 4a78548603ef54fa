"""One file of standard operators, and its tokenizer: for ONNX Runtime of any version, tract, and readers like them."""

from __future__ import annotations

from hdexport.package.files import write_library_files
from hdexport.package.graph import GraphOptions, write_graph
from hdexport.package.readers import onnx_package
from hdexport.package.target import GRAPH, Package, PackageTarget
from hdruntime.bundle.manifest import Task


def _write(package: Package) -> None:
    write_graph(package.bundle, package.directory / "model.onnx", package.graph)
    write_library_files(package)


TARGET = PackageTarget(
    name="onnx",
    system="ONNX Runtime and other readers of ONNX",
    source="https://onnxruntime.ai/docs/reference/compatibility.html",
    tried=(
        "onnxruntime 1.16.3",
        "onnxruntime 1.31.1",
        "onnxruntime-node 1.30.0",
        "onnxruntime-web 1.31.0-dev (WebAssembly in Chromium 156)",
        "tract 0.23.9",
    ),
    write=_write,
    run=onnx_package,
    next_step="Load model.onnx; tokenizer.json truncates and pads.",
    tasks=frozenset(Task),
    graph=GraphOptions(dtype="float32"),
    takes=GRAPH,
)
