"""One file of standard operators, and its tokenizer: for ONNX Runtime of any version, tract, and readers like them."""

from __future__ import annotations

from hdexport.package.files import with_graph
from hdexport.package.graph import GraphOptions
from hdexport.package.readers import onnx_package
from hdexport.package.target import GRAPH, PackageTarget
from hdruntime.bundle.manifest import Task

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
    write=with_graph({}),
    run=onnx_package,
    next_step="Load model.onnx; tokenizer.json truncates and pads.",
    tasks=frozenset(Task),
    graph=GraphOptions(dtype="float32"),
    takes=GRAPH,
)
