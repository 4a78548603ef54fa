"""ONNX Runtime on the CPU."""

from __future__ import annotations

__all__ = ["OnnxRuntimeRunner"]

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.batching import equal_length_groups, right_padded_rows
from hdruntime.bundle import Backend, Bundle, GraphFile
from hdruntime.constants import CPU_LOWERING, PORTABLE_LOWERING
from hdruntime.errors import BackendError, BundleCorruptError, OutOfMemoryError
from hdruntime.padding_limit import changes_with_padding

logger = logging.getLogger(__name__)

_ERRORS_ONLY = 3
"""ONNX Runtime's log level; what goes wrong reaches us as an exception."""

_SLOW_FUSIONS = ["BiasGeluFusion", "SkipLayerNormFusion"]
"""Fused kernels that lose to the plain ones on long inputs, which work in place: the sample model at 4096 tokens on two
AMD EPYC cores took 690 ms and grew by 164 MB with both fusions, 660 ms and 136 MB without (ONNX Runtime 1.31.1)."""

_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc")
"""What ONNX Runtime's errors say where its arena, or C++, got no memory; they have no class of their own."""

Inputs = Mapping[str, npt.NDArray[np.int64]]
Outputs = dict[str, npt.NDArray[np.float32]]


class OnnxRuntimeRunner:
    """A bundle's graph in an ONNX Runtime session on the CPU, also where the package has GPU providers.

    The fast attention of ONNX Runtime on the CPU, whose memory is linear in tokens, takes no mask. So rows
    with padding on the right run without it, grouped by length; only rows with other masks run with theirs. Where
    padding changes answers, batches run as they are given.

    Args:
        bundle: its graph for the CPU is taken, else its portable one.
        threads: threads of one run, None for ONNX Runtime's choice.

    Raises:
        BackendError: ONNX Runtime cannot load the graph.
        BundleCorruptError: the bundle has no graph, or one that differs from its manifest.
    """

    backend = Backend.ONNXRUNTIME
    prefers_equal_lengths = True
    batch_tokens = 4096
    """Two cores, all-MiniLM-L6-v2: 16384 tokens gained nothing and took 791 MB instead of 376."""
    most_in_flight = 1
    """A run uses the cores of its own accord; a second one would only take turns with it."""

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        manifest = bundle.manifest
        graph = _graph(bundle)
        self._has_tokens_axis = {spec.name: spec.shape[1:2] == ("tokens",) for spec in manifest.outputs}
        self._keeps_padding = changes_with_padding(manifest.block_sparse)
        self.max_len = manifest.max_len
        session = _session(bundle, graph, threads)
        _check_names(bundle, graph, "inputs", {item.name for item in session.get_inputs()})
        _check_names(bundle, graph, "outputs", {item.name for item in session.get_outputs()})
        self._session: Any = session
        logger.info("onnxruntime runs %s on the CPU", graph.file)

    def most_rows(self, tokens: int) -> int:
        """Any number; see :class:`hdruntime.backends.Runner`."""
        return sys.maxsize

    def computed_tokens(self, attention_mask: npt.NDArray[np.int64]) -> int:
        """Of rows whose padding is cut off their own tokens only; see :class:`hdruntime.backends.Runner`."""
        if self._keeps_padding or attention_mask.all():
            return attention_mask.size
        whole = ~right_padded_rows(attention_mask)
        return int(attention_mask[~whole].sum()) + attention_mask[whole].size

    def start(self, inputs: Inputs, outputs: Sequence[str]) -> Callable[[], Outputs]:
        """The run of a batch, which begins when its results are asked for; see :class:`hdruntime.backends.Runner`."""
        return functools.partial(self._run, inputs, outputs)

    def close(self) -> None:
        """Free memory, as soon as no other thread is amid a run; see :class:`hdruntime.backends.Runner`."""
        self._session = None

    def _run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        attention_mask = inputs["attention_mask"]
        if attention_mask.all():
            return self._run_as_given(inputs, outputs)
        batch, tokens = attention_mask.shape
        whole: Outputs = {}
        for rows, length in self._groups(attention_mask):
            part = self._run_as_given(
                {name: np.ascontiguousarray(array[rows, :length]) for name, array in inputs.items()}, outputs
            )
            for name, values in part.items():
                if not self._has_tokens_axis[name]:
                    shape = (batch, *values.shape[1:])
                    whole.setdefault(name, np.empty(shape, values.dtype))[rows] = values
                    continue
                if length is None:
                    values[attention_mask[rows] == 0] = 0
                shape = (batch, tokens, *values.shape[2:])
                whole.setdefault(name, np.zeros(shape, values.dtype))[rows, :length] = values
        return whole

    def _groups(self, attention_mask: npt.NDArray[np.int64]) -> Iterable[tuple[npt.NDArray[np.intp], int | None]]:
        """Rows that run together, and how many of their tokens do; None for all."""
        return [(np.arange(len(attention_mask)), None)] if self._keeps_padding else equal_length_groups(attention_mask)

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        session = self._session
        if session is None:
            raise BackendError("The ONNX Runtime session is closed; load the bundle again.")
        try:
            arrays = session.run(list(outputs), dict(inputs))
        except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
            raise _run_error(error, *inputs["input_ids"].shape) from error
        return dict(zip(outputs, arrays, strict=True))


def _run_error(error: Exception, batch: int, tokens: int) -> BackendError:
    if isinstance(error, MemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY):
        advice = (
            "Use smaller batches: --max-batch-tokens, in Python batch_tokens."
            if batch > 1
            else "Free memory, or cut the text into shorter ones."
        )
        return OutOfMemoryError(
            f"ONNX Runtime got no memory for a batch of {batch} x {tokens} tokens: {error}\n{advice}"
        )
    return BackendError(f"ONNX Runtime failed on a batch of {batch} x {tokens} tokens: {error}")


def _graph(bundle: Bundle) -> GraphFile:
    by_lowering = {graph.lowering: graph for graph in bundle.manifest.graphs}
    for lowering in (CPU_LOWERING, PORTABLE_LOWERING):
        if lowering in by_lowering:
            return by_lowering[lowering]
    raise BundleCorruptError(f"The bundle {bundle.path} has no ONNX graph that the CPU can run.\nRebuild it.")


def _session(bundle: Bundle, graph: GraphFile, threads: int | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    # A memory pattern is planned, and kept, per input shape: with documents of any length it only costs.
    options.enable_mem_pattern = False
    if threads is not None:
        options.intra_op_num_threads = threads
    path = bundle.file(graph.file)
    try:
        # By path, so that ONNX Runtime finds and maps model.onnx.data beside it.
        return onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=_SLOW_FUSIONS
        )
    except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
        raise BackendError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {error}\n"
            "Try a newer one: pip install -U onnxruntime"
        ) from error


def _check_names(bundle: Bundle, graph: GraphFile, kind: str, found: set[str]) -> None:
    listed = {spec.name for spec in getattr(bundle.manifest, kind)}
    if listed != found:
        raise BundleCorruptError(
            f"The {kind} of {graph.file} are {sorted(found)}, but the manifest of {bundle.path} lists "
            f"{sorted(listed)}.\nRebuild the bundle."
        )
