"""Builds an engine from an ONNX graph with Polygraphy, for TensorRT and TensorRT-RTX."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hdexport.graph.targets.tensorrt.build_watch import BuildWatch, Progress
from hdexport.graph.targets.tensorrt.packages import EngineTarget, load_polygraphy
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugin_class import take_plugin_errors
from hdplugins.tensorrt.plugins import plugins_with_kernels
from hdruntime.backends.tensorrt.engine_metadata import BuiltOn, EngineMetadata
from hdruntime.backends.tensorrt.log import log_of
from hdruntime.bundle.manifest import Backend, Dtype, EngineFile, ProfileShape, TensorRtVariant
from hdruntime.bundle.reader import sha256_of_file
from hdruntime.errors import EngineError, Setting
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.optional import require
from hdruntime.whole_files import write_whole

logger = logging.getLogger(__name__)

_PROFILE_COMPLAINT = re.compile(r"values for profile (\d+) violate shape constraints: (.*?)(?: In |$)", re.DOTALL)
"""TensorRT's message where a graph cannot take a profile's shapes; places in its sources follow."""

_NO_FUSED_ATTENTION = "Attention operation was not supported by a dedicated kernel"


_METADATA_VERSION = 2
"""Version of the keys of the engine metadata."""


def build_engine(
    onnx_path: Path,
    destination: Path,
    target: EngineTarget,
    *,
    bundle: Path,
    profiles: Sequence[ProfileShape],
    precision: Dtype,
    version_compatible: bool = False,
    kernels: Path | None = None,
    progress: Progress | None = None,
) -> EngineFile:
    """Build an engine and write it with its metadata, each whole or not at all.

    Args:
        onnx_path: a graph lowered by `tensorrt_graph`, weights beside it. Its inputs' first axis is the batch, an axis
            called memory that of recurrent states, and another without a size the tokens.
        destination: the engine's file; the metadata gets the same name with ``.json``.
        bundle: directory that contains ``destination``, to which the paths in the result are relative.
        precision: data type of the graph's weights, e.g. ``float16``: recorded, not set, because the network is
            strongly typed.
        version_compatible: build a TensorRT engine that later versions and TensorRT's lean runtime also run. The lean
            runtime is not put into the engine: code from a bundle is never run.
        kernels: the bundle's folder of kernels, None where the graph needs no plugin. TensorRT runs plugins while it
            builds; TensorRT-RTX does not.
        progress: called about a thousand times with TensorRT's phase, its completed steps and all its steps.
    """
    assert profiles, "an engine needs a profile"
    watch = BuildWatch(progress)
    with watch.guard():
        serialize = functools.partial(
            _serialize,
            onnx_path,
            target,
            kernels=kernels,
            profiles=profiles,
            version_compatible=version_compatible,
            monitor=watch.as_monitor(target.trt),
        )
        is_rtx = target.variant is Backend.TENSORRT_RTX
        try:
            serialized, plugins = serialize(user_allocation=is_rtx)
        except EngineError as rejection:
            if not is_rtx or watch.is_stopped:
                raise
            # TensorRT may reject the graph with either option: that error is raised here.
            serialized, plugins = serialize(user_allocation=False)
            logger.warning("The engine cannot be captured into CUDA graphs. %s", rejection)
    metadata = EngineMetadata(
        plugins=plugins,
        engine_sha256=hashlib.sha256(serialized).hexdigest(),
        onnx_sha256=onnx_hashes(onnx_path),
        built_on=built_here(),
    )
    metadata_path = destination.with_suffix(".json")
    engine = EngineFile(
        file=destination.relative_to(bundle).as_posix(),
        metadata=metadata_path.relative_to(bundle).as_posix(),
        variant=cast(TensorRtVariant, target.variant),  # `EngineTarget` takes no other
        version=target.trt.__version__,
        precision=precision,
        architectures=target.architectures,
        profiles=tuple(profiles),
        version_compatible=version_compatible,
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_whole(destination, serialized)
    write_engine_metadata(metadata, engine, metadata_path)
    return engine


def _serialize(
    onnx_path: Path,
    target: EngineTarget,
    *,
    kernels: Path | None,
    profiles: Sequence[ProfileShape],
    version_compatible: bool,
    monitor: Any,
    user_allocation: bool,
) -> tuple[Any, dict[str, int]]:
    """The engine as a buffer of bytes, and how many layers of each plugin it has.

    With ``user_allocation``, an engine of TensorRT-RTX allocates nothing when it runs, without which its stream cannot
    be captured (TensorRT-RTX's notes on CUDA graphs).
    """
    backend = load_polygraphy(target.variant)
    log, trt_logger = log_of(target.trt)
    # Errors of an earlier build.
    log.take_errors()
    take_plugin_errors()
    # Polygraphy has no option for the logger it gives to TensorRT; its own prints to stdout.
    backend.util.TRT_LOGGER = trt_logger
    _send_messages_to_logging()
    from polygraphy.exception import PolygraphyException

    try:
        with _plugins(target, kernels):
            network = backend.network_from_onnx_path(
                str(onnx_path),
                # From version 11 on networks are always strongly typed, and a release may drop the flag.
                strongly_typed=hasattr(target.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"),
            )
        config = functools.partial(
            _config,
            target=target,
            profiles=profiles,
            version_compatible=version_compatible,
            user_allocation=user_allocation,
            monitor=monitor,
        )
        # Counted before the build, which consumes the network.
        plugins = _plugin_layers(target.trt, network[1])
        return backend.engine_bytes_from_network(network, config=config), plugins
    except (PolygraphyException, TypeError) as error:
        # TypeError is how the bindings say that TensorRT could not make an object, e.g. without CUDA.
        messages = [*take_plugin_errors(), *log.take_errors()]
        raise _translated(error, messages, profiles) from error


def _plugins(target: EngineTarget, kernels: Path | None) -> AbstractContextManager[None]:
    if target.variant is Backend.TENSORRT:
        return plugins_with_kernels(target.trt, kernels)
    if provide_library_link():
        return plugins_with_kernels(target.trt, None)
    # Without the link the parser ends the process at one of hdexport's plugins, so no plugin is registered.
    logger.warning("tensorrt_rtx was imported before hdexport, so that it cannot use plugins: import hdexport first.")
    return nullcontext()


def _plugin_layers(trt: ModuleType, network: Any) -> dict[str, int]:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    for layer in plugins:
        layer.__class__ = trt.IPluginV3Layer  # how the bindings give access to a plugin layer's own attributes
    return dict(Counter(layer.plugin.plugin_name for layer in plugins))


def _send_messages_to_logging() -> None:
    from polygraphy.logger import G_LOGGER

    G_LOGGER.use_python_logging_system = True
    G_LOGGER.colors = False
    G_LOGGER.module_severity = G_LOGGER.WARNING
    # Polygraphy also raises errors that it logs, and so do we.
    logging.getLogger("Polygraphy").addFilter(lambda record: record.levelno < logging.ERROR)


def _bounds_of_axis(tensor: Any, axis: int, shape: ProfileShape) -> tuple[int, int, int]:
    """(min, opt, max) of an axis of an input; TensorRT has -1 for an axis whose size varies."""
    size = tensor.shape[axis]
    if axis == 0:
        return shape.batch
    if size >= 0:
        return size, size, size
    if tensor.get_dimension_name(axis) != "memory":
        return shape.tokens
    if shape.memory is None:
        raise EngineError(
            f"The input {tensor.name} has an axis memory, and the profile has no size for it.",
            hint=(
                "Give shapes of this input with ",
                Setting("min_shapes"),
                ", ",
                Setting("opt_shapes"),
                " and ",
                Setting("max_shapes"),
                ", or use ",
                Setting("profiles"),
                ".",
            ),
        )
    return shape.memory


def _config(
    builder: Any,
    network: Any,
    *,
    target: EngineTarget,
    profiles: Sequence[ProfileShape],
    version_compatible: bool,
    user_allocation: bool,
    monitor: Any,
) -> Any:
    """The builder's configuration; Polygraphy's own would make a timing cache, which is of this machine's GPU alone."""
    trt = target.trt
    config = builder.create_builder_config()
    for shape in profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            bounds = [_bounds_of_axis(tensor, axis, shape) for axis in range(len(tensor.shape))]
            profile.set_shape(tensor.name, *zip(*bounds, strict=True))
        config.add_optimization_profile(profile)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = monitor
    # A float32 engine computes in float32.
    config.clear_flag(trt.BuilderFlag.TF32)
    # A batch then needs scratch memory for its own shape, not for the profile's largest shape. TensorRT has the feature
    # since 10.10.
    if hasattr(trt.PreviewFeature, "RUNTIME_ACTIVATION_RESIZE_10_10"):
        config.set_preview_feature(trt.PreviewFeature.RUNTIME_ACTIVATION_RESIZE_10_10, True)
    flags = [trt.BuilderFlag.REQUIRE_USER_ALLOCATION] if user_allocation else []
    if version_compatible:
        flags += [trt.BuilderFlag.VERSION_COMPATIBLE, trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME]
    for flag in flags:
        config.set_flag(flag)
    if target.restricted_to:
        config.num_compute_capabilities = len(target.restricted_to)
        for index, name in enumerate(target.restricted_to):
            config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), index)
    return config


def _translated(error: Exception, messages: Sequence[str], profiles: Sequence[ProfileShape]) -> EngineError:
    """Our error for TensorRT's messages, with a hint."""
    text = "\n".join(messages) or str(error)
    complaint = _PROFILE_COMPLAINT.search(text)
    if complaint:
        profile = profiles[int(complaint[1])]
        memory = "" if profile.memory is None else f", with memories of {_range(profile.memory)} tokens"
        return EngineError(
            f"The graph cannot take the profile for {_range(profile.batch)} sequences of "
            f"{_range(profile.tokens)} tokens{memory}: {complaint[2].strip()}",
            hint=(
                "Build with ",
                Setting("max_len", profile.tokens[2], command="build"),
                " or more, or give shorter ",
                Setting("profiles"),
                ".",
            ),
        )
    if _NO_FUSED_ATTENTION in text:
        return EngineError(
            "TensorRT has no fused attention for this precision and head size.",
            hint=(
                "Build with ",
                Setting("fp16", command="build"),
                " or ",
                Setting("bf16", command="build"),
                ", or without an engine: ",
                Setting("targets", "onnx"),
            ),
        )
    return EngineError(
        f"TensorRT did not build the engine: {text}", hint=("Build without the engine: ", Setting("targets", "onnx"))
    )


def _range(values: tuple[int, int, int]) -> str:
    return f"{values[0]} to {values[2]}"


def built_here() -> BuiltOn:
    """This machine, now."""
    visible = gpus()
    return BuiltOn(
        platform=platform.platform(),
        driver=driver_version(),
        gpu=visible[0].name if visible else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def onnx_hashes(path: Path) -> dict[str, str]:
    """SHA-256 of a graph's file and of each file that holds its weights, by name.

    The lowered graph is not kept; its weights are the bundle's, whose hash is also in the manifest.
    """
    onnx = require("onnx")
    model = onnx.load(path, load_external_data=False)
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return {name: sha256_of_file(path.parent / name) for name in (path.name, *sorted(locations))}


def write_engine_metadata(metadata: EngineMetadata, engine: EngineFile, path: Path) -> None:
    """Write the JSON, whole or not at all: the metadata, and the manifest's facts but for the names of files."""
    facts = {key: value for key, value in asdict(engine).items() if key not in ("file", "metadata")}
    write_whole(path, json.dumps({"metadata_version": _METADATA_VERSION, **asdict(metadata), **facts}, indent=2) + "\n")
