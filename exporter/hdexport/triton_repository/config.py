"""How a Triton Inference Server serves a bundle: the message ``inference.ModelConfig``.

The sources of Triton's core and backends of mid-2026 say what a server accepts. It loads the profiles of a TensorRT
engine that ``instance_group`` names, and uses the tightest that fits for each batch. A batch that fits no profile fails
with all its requests, so ``max_batch_size`` is the largest batch that has a profile at every length.
"""

from __future__ import annotations

__all__ = ["most_rows", "triton_config"]

from collections.abc import Sequence

from hdexport.triton_repository.protobuf_text import Message, Name
from hdruntime.bundle.manifest import Backend, EngineFile, ProfileShape, TensorSpec
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError

_GRAPH_ROWS = 8
"""Most rows of a batch for a graph, which has no profiles: as many as an engine's by default."""

_DTYPES = {"int64": "TYPE_INT64", "int32": "TYPE_INT32", "float32": "TYPE_FP32"}

_PLATFORMS = {Backend.TENSORRT: "tensorrt_plan", Backend.ONNXRUNTIME: "onnxruntime_onnx"}
"""Triton's older name of a backend, without which Triton takes no list of profiles."""


def triton_config(bundle: Bundle, engine: EngineFile | None, *, name: str, file: str) -> Message:
    """The configuration of a model.

    Args:
        bundle: the served bundle.
        engine: its TensorRT engine that is served; None for its graph, in ONNX Runtime on a CPU.
        name: of the model.
        file: of the engine or the graph, in the directory of its version.

    Raises:
        BundleCorruptError: an input or output is of a type that Triton models do not use, or has no batch axis.
    """
    backend = Backend.ONNXRUNTIME if engine is None else Backend.TENSORRT
    rows = most_rows(engine)
    tuned = set() if engine is None else {profile.batch[1] for profile in engine.profiles}
    return {
        "name": name,
        "platform": _PLATFORMS[backend],
        "backend": backend.value,
        "default_model_filename": file,
        "max_batch_size": rows,
        "input": [_tensor(bundle, spec) for spec in bundle.manifest.inputs],
        "output": [_tensor(bundle, spec) for spec in bundle.manifest.outputs],
        # One row needs no waiting for; a preference without the largest batch would keep that from being made.
        "dynamic_batching": {"preferred_batch_size": sorted({size for size in tuned if 1 < size < rows} | {rows})},
        **_placement(engine),
    }


def most_rows(engine: EngineFile | None) -> int:
    """The largest n so that batches of 1 to n rows have a profile at every length that the engine takes; 0 for none."""
    if engine is None:
        return _GRAPH_ROWS
    # The profile of a batch changes only where one begins or has just ended.
    lengths = {edge for profile in engine.profiles for edge in (profile.tokens[0], profile.tokens[2] + 1)}
    serving = [[profile for profile in engine.profiles if _takes(profile, tokens)] for tokens in lengths]
    return min(_rows_without_a_gap(profiles) for profiles in serving if profiles)


def _takes(profile: ProfileShape, tokens: int) -> bool:
    return profile.tokens[0] <= tokens <= profile.tokens[2]


def _rows_without_a_gap(profiles: Sequence[ProfileShape]) -> int:
    most = 0
    for smallest, _, largest in sorted(profile.batch for profile in profiles):
        if smallest <= most + 1:
            most = max(most, largest)
    return most


def _tensor(bundle: Bundle, spec: TensorSpec) -> Message:
    if spec.dtype not in _DTYPES or spec.shape[:1] != ("batch",):
        raise BundleCorruptError(
            f"{bundle.path} lists {spec.name} as {spec.dtype} {list(spec.shape)}; Triton needs [batch, ...] of "
            f"{', '.join(_DTYPES)}.\nRebuild the bundle."
        )
    # Triton adds the batch axis itself.
    dims = [size if isinstance(size, int) else -1 for size in spec.shape[1:]]
    return {"name": spec.name, "data_type": Name(_DTYPES[spec.dtype]), "dims": dims}


def _placement(engine: EngineFile | None) -> Message:
    if engine is None:
        # As our own backend sets it: a pattern is planned, and kept, for each shape, and documents have many.
        pattern = {"key": "enable_mem_pattern", "value": {"string_value": "0"}}
        return {"instance_group": [{"count": 1, "kind": Name("KIND_CPU")}], "parameters": [pattern]}
    # Without this list Triton loads the first profile only.
    profiles = [str(index) for index in range(len(engine.profiles))]
    return {"instance_group": [{"count": 1, "kind": Name("KIND_GPU"), "profile": profiles}]}
