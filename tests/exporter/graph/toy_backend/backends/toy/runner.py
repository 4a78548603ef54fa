"""A bundle's graph, interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator

import hdruntime
from hdruntime.arrays import Inputs, Outputs
from hdruntime.backends.bundle_runner import chosen_graph
from hdruntime.backends.cpu_runner import CpuRunner
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError


class ToyRunner(CpuRunner):
    """Interprets one node after the other."""

    backend = "toy"
    precision = hdruntime.Precision.FLOAT32
    batch_tokens = 64

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        graph = chosen_graph(bundle, ("toy",), where="the toy")
        self._interpreter: Any = ReferenceEvaluator(onnx.load(bundle.file(graph.file)))

    def close(self) -> None:
        """Forget the graph."""
        self._interpreter = None

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        if self._interpreter is None:
            raise BackendError("The session is closed; load the bundle again.")
        return dict(zip(outputs, self._interpreter.run(list(outputs), dict(inputs)), strict=True))
