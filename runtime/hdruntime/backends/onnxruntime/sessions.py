"""Sessions of ONNX Runtime on a bundle's graphs, and the meaning of their errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hdruntime.backends.bundle_runner import failed, out_of_memory
from hdruntime.backends.onnxruntime import FAST_MATH
from hdruntime.backends.precision import Precision
from hdruntime.bundle.graph_interface import Found, check_interface
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.process_limits import chosen_threads, cpu_quota, free_bytes

logger = logging.getLogger(__name__)

_ERRORS_ONLY = 3
"""ONNX Runtime's log level; its exceptions carry the errors."""

_OUT_OF_MEMORY = (
    "Failed to allocate memory",
    "bad_alloc",
    # From the system, such as for the stack of a thread.
    "Cannot allocate memory",
    # From CUDA, its libraries, and the arena under a memory limit.
    "out of memory",
    "ALLOC_FAILED",
    "Available memory of",
)
"""Words of ONNX Runtime's out-of-memory errors, which have no class of their own."""

_COPIES_SHARE = 0.8

_NUMPY_NAME = {"tensor(int64)": "int64", "tensor(float)": "float32"}
"""ONNX Runtime's name of a type -> NumPy's, for the types of manifests."""


def session_options(threads: int | None, *, spinning: bool = True, precision: Precision = Precision.FLOAT32) -> Any:
    """ONNX Runtime's ``SessionOptions`` for inputs of any shape.

    Args:
        threads: threads of one run; None for `chosen_threads`. ONNX Runtime's own choice counts all cores of the
            machine, and binds each thread to one of them, which the process may not use.
        spinning: whether waiting threads keep their cores busy: faster, unless others need the cores, or a quota ends
            before the threads' work.
        precision: ``bfloat16`` rounds the inputs of float32 matmuls to bfloat16, where `multiplies_bfloat16`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    # A memory pattern is planned and kept per input shape: with documents of any length it only costs memory.
    options.enable_mem_pattern = False
    options.intra_op_num_threads, _ = chosen_threads(threads)
    quota = cpu_quota()
    if not spinning or (quota is not None and quota < options.intra_op_num_threads):
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if precision is Precision.BFLOAT16:
        options.add_session_config_entry(FAST_MATH, "1")
    return options


def kept_upcasts(bundle: Bundle, copies_bytes: int | None = None) -> list[str]:
    """Optimizers to disable in a CPU session so that half-precision weights are upcast in each run.

    ONNX Runtime folds the upcasts to float32 copies of the weights when it opens a session. Where the copies take more
    than `_COPIES_SHARE` of the free memory, it upcasts a weight when a node reads it, which takes longer: six layers of
    Qwen3-Embedding-0.6B at 1, 128 and 512 tokens 2.3, 1.2 and 1.1 times the time, in 0.38 GB instead of 0.53, of which
    0.16 are not the mapped file (ONNX Runtime 1.31.1, two cores of an AMD EPYC, 2026-11-29).

    Args:
        copies_bytes: bytes that the copies may take; None for the share of the free memory, with a warning where they
            take more.
    """
    manifest, free = bundle.manifest, free_bytes()
    copies = 4 * manifest.parameters
    if copies_bytes is not None:
        return ["ConstantFolding"] if manifest.stores_half_weights and copies > copies_bytes else []
    if free is None or not manifest.stores_half_weights or copies <= _COPIES_SHARE * free:
        return []
    logger.warning(
        "%s: float32 copies of the weights would take %.1f GB of %.1f GB of free memory, so ONNX Runtime upcasts them "
        "in each run, which is slower.",
        manifest.name,
        copies / 1e9,
        free / 1e9,
    )
    return ["ConstantFolding"]


def open_session(
    bundle: Bundle,
    graph: GraphFile,
    options: Any,
    *,
    providers: Sequence[tuple[str, Mapping[str, str]]],
    disabled_optimizers: Sequence[str] = (),
) -> Any:
    """An ``InferenceSession`` that never falls back to other providers when a run fails. A graph that differs from its
    manifest is rejected; `providers` are names with options, best first."""
    import onnxruntime

    path = bundle.file(graph.file)
    try:
        # By path, so that ONNX Runtime finds and maps model.onnx.data beside it.
        session = onnxruntime.InferenceSession(
            # ONNX Runtime writes a path as UTF-8, even if the locale decoded it with another encoding.
            os.fsencode(path).decode("utf-8", "surrogateescape"),
            options,
            providers=[name for name, _ in providers],
            provider_options=[dict(settings) for _, settings in providers],
            disabled_optimizers=list(disabled_optimizers),
            enable_fallback=0,
        )
    except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
        if _is_out_of_memory(error):
            raise OutOfMemoryError(f"ONNX Runtime got no memory for {path}: {error}", hint="Free memory.") from error
        raise BackendError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {error}",
            hint="Try a newer one: pip install -U onnxruntime",
        ) from error
    inputs, outputs = _interface(session.get_inputs()), _interface(session.get_outputs())
    check_interface(bundle, graph, inputs=inputs, outputs=outputs)
    return session


def run_error(error: Exception, batch: int, tokens: int) -> BackendError:
    """Our error for a failed run of a batch."""
    if _is_out_of_memory(error):
        return out_of_memory("ONNX Runtime", error, batch, tokens)
    return failed("ONNX Runtime", error, batch, tokens)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY)


def _interface(values: Iterable[Any]) -> Found:
    return {value.name: (_NUMPY_NAME.get(value.type, value.type), value.shape) for value in values}
