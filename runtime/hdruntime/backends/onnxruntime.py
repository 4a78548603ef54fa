"""ONNX Runtime on the CPU."""

from __future__ import annotations

__all__ = ["OnnxRuntimeRunner", "graph_on_cpu"]

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.backends.bundle_graphs import chosen_graph
from hdruntime.backends.bundle_runner import Inputs, Outputs
from hdruntime.backends.equal_lengths import EqualLengthRunner, give_memory_back
from hdruntime.backends.host_memories import HostMemories
from hdruntime.backends.onnxruntime_sessions import GraphRunner, open_session, session_options
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CPU_LOWERING, PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

_SLOW_FUSIONS = ["BiasGeluFusion", "SkipLayerNormFusion"]
"""Fused kernels that lose to the plain ones on long inputs, which work in place: the sample model at 4096 tokens on two
AMD EPYC cores took 690 ms and grew by 164 MB with both fusions, 660 ms and 136 MB without (ONNX Runtime 1.31.1)."""

_USES_ARENA = False
"""ONNX Runtime's arena keeps the memory of its largest batch as long as the session lives. The sample model on two
shared cores of an AMD EPYC (ONNX Runtime 1.31.1, 2026-11-22): a session of 109 MB grew to 911 MB after a batch of
64 x 512 tokens and 100 calls of 16; without an arena it stays at 109 MB. A call then takes 1.05 times the CPU time at
16 tokens, 1.00 at 128 and 512, 1.02 at 1024 (medians of four rounds, 0.91 to 1.20), and the peak of a batch of 4096
tokens is 152 MB above the session instead of 103, because the C library leaves gaps. Shrinking the arena after the
large batch left 1.85 times the memory from before it."""

_LARGE_RUN_TOKENS = 4096
"""After a run of more tokens the C library returns free memory to the system: 12 x 512 tokens leave twice the memory
otherwise. It took 1.00 to 1.02 times the CPU time of that batch."""


class OnnxRuntimeRunner(EqualLengthRunner, GraphRunner):
    """A bundle's graph in an ONNX Runtime session on the CPU, also where the package has GPU providers.

    The fast attention of ONNX Runtime on the CPU, whose memory is linear in tokens, takes no mask.

    Args:
        bundle: the runner takes its graph for the CPU, else its portable graph.
        threads: threads of one run; None for ONNX Runtime's choice.
        spinning: whether waiting threads keep their cores busy: faster, unless others need the cores.
        precision: ``float32``, which is also ``auto``, or ``int8`` of a bundle with that graph.

    Raises:
        BackendUnavailableError: ONNX Runtime does not compute in the precision, or the bundle has no such graph.
        BackendError: ONNX Runtime cannot load the graph.
        BundleCorruptError: the bundle has no graph, or one that differs from its manifest.
    """

    backend = Backend.ONNXRUNTIME
    batch_tokens = 4096
    """Two cores, all-MiniLM-L6-v2: 16384 tokens gained nothing and took 791 MB instead of 376."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        spinning: bool = True,
        precision: Precision = Precision.AUTO,
    ) -> None:
        graph = graph_on_cpu(bundle, precision)
        self.precision = precision if precision.has_graphs else Precision.FLOAT32
        options = session_options(threads, spinning=spinning)
        options.enable_cpu_mem_arena = _USES_ARENA
        session = open_session(
            bundle, graph, options, providers=[("CPUExecutionProvider", {})], disabled_optimizers=_SLOW_FUSIONS
        )
        super().__init__(bundle, session)
        logger.info("onnxruntime runs %s on the CPU", graph.file)

    def open_memories(self, rows: int) -> HostMemories:
        """Arrays in the memory of the CPU; see :class:`hdruntime.backends.Runner`."""
        return HostMemories(self, rows)

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        with self._open_session(inputs) as session:
            arrays: list[npt.NDArray[np.float32]] = session.run(outputs, dict(inputs))
        self._give_memory_back(inputs)
        return dict(zip(outputs, arrays, strict=True))

    def run_bound(
        self, inputs: Inputs, outputs: Sequence[str], memories: Mapping[str, Any], left: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch as given, on memories that are arrays."""
        values = [{name: self.on_device(array) for name, array in arrays.items()} for arrays in (memories, left)]
        return super().run_bound(inputs, outputs, *values)

    def _bound(self, session: Any, inputs: Inputs, *others: Any) -> Outputs:
        results = super()._bound(session, inputs, *others)
        self._give_memory_back(inputs)
        return results

    def _give_memory_back(self, inputs: Inputs) -> None:
        if inputs[self._ids].size > _LARGE_RUN_TOKENS:
            give_memory_back()


def graph_on_cpu(bundle: Bundle, precision: Precision) -> GraphFile:
    """The bundle's graph that computes in a precision on the CPU.

    Raises:
        BackendUnavailableError: ONNX Runtime does not compute in it, or the bundle has no such graph.
        BundleCorruptError: the bundle has no graph at all.
    """
    if precision is Precision.BFLOAT16:
        raise BackendUnavailableError(
            f"ONNX Runtime does not compute in {precision.value} on a CPU, OpenVINO does.\n"
            "Leave out the precision, or use the backend openvino."
        )
    if precision.has_graphs:
        return chosen_graph(bundle, (CPU_LOWERING,), where="ONNX Runtime on the CPU", precision=precision)
    return chosen_graph(bundle, (CPU_LOWERING, PORTABLE_LOWERING), where="the CPU")
