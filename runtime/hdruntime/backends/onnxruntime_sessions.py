"""Sessions of ONNX Runtime on a bundle's graphs, and what their errors mean."""

from __future__ import annotations

__all__ = ["Inputs", "Outputs", "chosen_graph", "closed_error", "open_session", "run_error", "session_options"]

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.graph_interface import Found, check_interface
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, BundleCorruptError, OutOfMemoryError

_ERRORS_ONLY = 3
"""ONNX Runtime's log level; what goes wrong reaches us as an exception."""

_OUT_OF_MEMORY = (
    "Failed to allocate memory",
    "bad_alloc",
    # Of CUDA, its libraries, and the arena where a limit is held.
    "out of memory",
    "ALLOC_FAILED",
    "Available memory of",
)
"""What ONNX Runtime's errors say where it got no memory; they have no class of their own."""

_NUMPY_NAME = {"tensor(int64)": "int64", "tensor(float)": "float32"}
"""ONNX Runtime's name of a type -> NumPy's, of those that manifests have."""

Inputs = Mapping[str, npt.NDArray[Any]]
Outputs = dict[str, npt.NDArray[np.float32]]


def chosen_graph(bundle: Bundle, lowerings: Sequence[str], *, where: str) -> GraphFile:
    """The bundle's graph of the first lowering that it has.

    Args:
        bundle: an opened bundle.
        lowerings: best first.
        where: what shall run it, for the message.

    Raises:
        BundleCorruptError: there is none.
    """
    by_lowering = {graph.lowering: graph for graph in bundle.manifest.graphs}
    for lowering in lowerings:
        if lowering in by_lowering:
            return by_lowering[lowering]
    raise BundleCorruptError(f"The bundle {bundle.path} has no ONNX graph that {where} can run.\nRebuild it.")


def session_options(threads: int | None, *, spinning: bool = True) -> Any:
    """ONNX Runtime's ``SessionOptions`` for inputs of any shape.

    Args:
        threads: threads of one run, None for ONNX Runtime's choice.
        spinning: whether threads that wait for work keep their cores busy: faster, unless others need these.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    # A memory pattern is planned, and kept, per input shape: with documents of any length it only costs.
    options.enable_mem_pattern = False
    if threads is not None:
        options.intra_op_num_threads = threads
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def open_session(
    bundle: Bundle,
    graph: GraphFile,
    options: Any,
    *,
    providers: Sequence[tuple[str, Mapping[str, str]]],
    disabled_optimizers: Sequence[str] = (),
) -> Any:
    """An ``InferenceSession`` that never falls back to other providers of its own accord when it fails.

    Args:
        bundle: an opened bundle.
        graph: one of its graphs.
        options: as `session_options` makes them.
        providers: name and options of each, best first.
        disabled_optimizers: of ONNX Runtime's, that are left out.

    Raises:
        BackendError: ONNX Runtime cannot load the graph.
        OutOfMemoryError: there is too little memory for it.
        BundleCorruptError: the graph differs from its manifest.
    """
    import onnxruntime

    path = bundle.file(graph.file)
    try:
        # By path, so that ONNX Runtime finds and maps model.onnx.data beside it.
        session = onnxruntime.InferenceSession(
            # ONNX Runtime writes a path as UTF-8, whatever the locale decoded it with.
            os.fsencode(path).decode("utf-8", "surrogateescape"),
            options,
            providers=[name for name, _ in providers],
            provider_options=[dict(settings) for _, settings in providers],
            disabled_optimizers=list(disabled_optimizers),
            enable_fallback=0,
        )
    except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
        if _is_out_of_memory(error):
            raise OutOfMemoryError(f"ONNX Runtime got no memory for {path}: {error}\nFree memory.") from error
        raise BackendError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {error}\n"
            "Try a newer one: pip install -U onnxruntime"
        ) from error
    inputs, outputs = _interface(session.get_inputs()), _interface(session.get_outputs())
    check_interface(bundle, graph, inputs=inputs, outputs=outputs)
    return session


def run_error(error: Exception, batch: int, tokens: int) -> BackendError:
    """What a failed run of a batch means."""
    if _is_out_of_memory(error):
        advice = (
            "Use smaller batches: --batch-tokens, in Python batch_tokens."
            if batch > 1
            else "Free memory, or cut the text into shorter ones."
        )
        return OutOfMemoryError(
            f"ONNX Runtime got no memory for a batch of {batch} x {tokens} tokens: {error}\n{advice}"
        )
    return BackendError(f"ONNX Runtime failed on a batch of {batch} x {tokens} tokens: {error}")


def closed_error() -> BackendError:
    """Said where a run is asked of a runner that is closed."""
    return BackendError("The ONNX Runtime session is closed; load the bundle again.")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY)


def _interface(values: Iterable[Any]) -> Found:
    return {value.name: (_NUMPY_NAME.get(value.type, value.type), value.shape) for value in values}
