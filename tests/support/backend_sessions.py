"""Sessions in each backend that runs graphs, on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hdruntime.backends import Runner
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.onnxruntime.cuda import OnnxRuntimeCudaRunner
from hdruntime.backends.openvino import OPENVINO_LOWERING
from hdruntime.backends.openvino.runner import OpenVinoRunner
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.session import Session
from support.needs import needs_openvino

BACKENDS = ["onnxruntime", "onnxruntime_cuda", pytest.param("openvino", marks=needs_openvino)]
"""Parameters of a fixture that asks for `session_in`."""

_RUNNERS: dict[str, Callable[[Bundle], Runner]] = {
    "onnxruntime": OnnxRuntimeRunner,
    "onnxruntime_cuda": OnnxRuntimeCudaRunner,
    "openvino": OpenVinoRunner,
}


def session_in(backend: str, bundle: Bundle, request: pytest.FixtureRequest) -> Session:
    """A session in a backend, of a bundle's portable graph; the device of the code for a GPU is the CPU."""
    if backend == "onnxruntime_cuda":
        request.getfixturevalue("cuda_on_cpu")
    if backend == "openvino":
        also = GraphFile(file="model.onnx", lowering=OPENVINO_LOWERING, dtype="float32")
        graphs = (*bundle.manifest.graphs, also)
        bundle = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, graphs=graphs))
    return Session(bundle, _RUNNERS[backend](bundle))
