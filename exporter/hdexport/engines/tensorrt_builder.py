"""ONNX to engine, through Polygraphy, for TensorRT and TensorRT-RTX."""

from __future__ import annotations

__all__ = ["build_engine", "check_target", "target_architectures"]

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hdexport.engines.build_watch import BuildWatch, Progress
from hdexport.engines.passport_writer import built_here, onnx_hashes, write_passport
from hdexport.engines.tensorrt_packages import (
    default_architectures,
    load_flavour,
    load_polygraphy,
    supported_architectures,
)
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugins import plugins_with_kernels, take_plugin_errors
from hdruntime.backends.tensorrt.log import log_of
from hdruntime.bundle.manifest import Backend, Dtype, EngineFile, Flavour, ProfileShape
from hdruntime.bundle.passport import Passport
from hdruntime.errors import EngineError, InputError
from hdruntime.gpu.driver import gpus
from hdruntime.whole_files import write_whole

logger = logging.getLogger(__name__)

_PROFILE_COMPLAINT = re.compile(r"values for profile (\d+) violate shape constraints: (.*?)(?: In |$)", re.DOTALL)
"""How TensorRT says that the graph cannot take a profile's shapes; the rest are places in its sources."""

_NO_FUSED_ATTENTION = "Attention operation was not supported by a dedicated kernel"


def check_target(flavour: Backend, *, architectures: Sequence[str] = ()) -> None:
    """Find out before any work whether an engine can be built here.

    Args:
        flavour: ``Backend.TENSORRT`` or ``Backend.TENSORRT_RTX``.
        architectures: GPU architectures as :func:`build_engine` takes them.

    Raises:
        MissingDependencyError: the package is not installed.
        EngineError: the flavour cannot build here.
        InputError: it cannot build for one of the architectures.
    """
    _check_architectures(load_flavour(flavour), flavour, architectures)


def target_architectures(flavour: Backend, *, architectures: Sequence[str] = ()) -> tuple[str, ...]:
    """The GPU architectures that an engine will run on, e.g. ``("sm86", "sm89")``.

    Args:
        flavour: ``Backend.TENSORRT`` or ``Backend.TENSORRT_RTX``.
        architectures: as :func:`build_engine` takes them.

    Raises:
        as :func:`check_target`.
    """
    trt = load_flavour(flavour)
    _check_architectures(trt, flavour, architectures)
    return tuple(architectures) or _usual_architectures(trt, flavour)


def build_engine(
    onnx_path: Path,
    destination: Path,
    *,
    bundle: Path,
    flavour: Backend,
    profiles: Sequence[ProfileShape],
    precision: Dtype,
    architectures: Sequence[str] = (),
    version_compatible: bool = False,
    kernels: Path | None = None,
    timing_cache: Path | None = None,
    progress: Progress | None = None,
) -> EngineFile:
    """Build an engine and write it with its passport, each whole or not at all.

    Args:
        onnx_path: a graph lowered by :func:`hdexport.graph.lowering.tensorrt.tensorrt_graph`, weights beside it.
            All its inputs have the shape [batch, tokens].
        destination: the engine's file; the passport gets the same name with ``.json``.
        bundle: directory that contains ``destination``, to which the paths in the result are relative.
        flavour: ``Backend.TENSORRT``, which needs the GPU that the engine is for, or
            ``Backend.TENSORRT_RTX``, which needs none.
        profiles: the shapes that the engine takes, at least one.
        precision: of the graph's weights, e.g. ``float16``. It is recorded, not set: the network is strongly
            typed.
        architectures: GPU architectures to restrict a TensorRT-RTX engine to, e.g. ``("sm86", "sm89")``;
            without any it runs on all since Ampere.
        version_compatible: make a TensorRT engine that later versions run too, and TensorRT's lean runtime. The
            lean runtime is not put into the engine: code from a bundle is never run.
        kernels: the bundle's folder of kernels, None where the graph needs no plugin. TensorRT runs plugins while it
            builds; TensorRT-RTX does not.
        timing_cache: file in which TensorRT remembers its measurements from build to build; made when
            missing. TensorRT-RTX measures nothing and has no use for it.
        progress: called with TensorRT's phase, its steps done and all its steps, about a thousand times.

    Raises:
        MissingDependencyError: TensorRT, Polygraphy or onnx is not installed.
        InputError: an architecture is not supported.
        EngineError: TensorRT cannot build here, or refuses the graph or a profile.
        KeyboardInterrupt: Ctrl-C was pressed; nothing was written.
    """
    assert profiles, "an engine needs a profile"
    trt = load_flavour(flavour)
    _check_architectures(trt, flavour, architectures)
    if not onnx_path.is_file():
        raise EngineError(f"There is no ONNX file at {onnx_path}.\nExport it first: hdexport build")
    watch = BuildWatch(progress)
    # What an earlier build left.
    log_of(trt)[0].take_errors()
    take_plugin_errors()
    with watch.guard():
        serialized, plugins = _serialize(
            onnx_path,
            flavour=flavour,
            kernels=kernels,
            profiles=profiles,
            architectures=architectures,
            version_compatible=version_compatible,
            timing_cache=timing_cache,
            monitor=watch.as_monitor(trt),
        )
    passport = Passport(
        flavour=cast(Flavour, flavour.value),  # `load_flavour` takes no other
        version=trt.__version__,
        precision=precision,
        architectures=target_architectures(flavour, architectures=architectures),
        profiles=tuple(profiles),
        plugins=plugins,
        engine_sha256=hashlib.sha256(serialized).hexdigest(),
        onnx_sha256=onnx_hashes(onnx_path),
        built_on=built_here(),
        version_compatible=version_compatible,
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_whole(destination, serialized)
    write_passport(passport, destination.with_suffix(".json"))
    return EngineFile(
        file=destination.relative_to(bundle).as_posix(),
        passport=destination.with_suffix(".json").relative_to(bundle).as_posix(),
        flavour=passport.flavour,
        version=passport.version,
        precision=precision,
        architectures=passport.architectures,
        profiles=passport.profiles,
        version_compatible=version_compatible,
    )


def _check_architectures(trt: ModuleType, flavour: Backend, architectures: Sequence[str]) -> None:
    if flavour is Backend.TENSORRT:
        if architectures:
            raise InputError(
                "--sm is for TensorRT-RTX; TensorRT builds for the GPU of this machine.\n"
                "Leave --sm out, or use --target tensorrt-rtx."
            )
        return
    supported = supported_architectures(trt)
    unknown = [name for name in architectures if name not in supported]
    if unknown:
        raise InputError(
            f"TensorRT-RTX {trt.__version__} does not build for {', '.join(unknown)}.\n"
            f"Give --sm with some of {', '.join(name.removeprefix('sm') for name in supported)}."
        )


def _usual_architectures(trt: ModuleType, flavour: Backend) -> tuple[str, ...]:
    return (gpus()[0].architecture,) if flavour is Backend.TENSORRT else default_architectures(trt)


def _serialize(
    onnx_path: Path,
    *,
    flavour: Backend,
    kernels: Path | None,
    profiles: Sequence[ProfileShape],
    architectures: Sequence[str],
    version_compatible: bool,
    timing_cache: Path | None,
    monitor: Any,
) -> tuple[Any, dict[str, int]]:
    """The engine as a buffer of bytes, and how many layers of each plugin it has."""
    backend = load_polygraphy(flavour)
    _send_messages_to_logging(backend, flavour)
    from polygraphy.exception import PolygraphyException

    # TensorRT-RTX times its kernels on the GPU that runs them; its timing cache does nothing.
    cache = str(timing_cache) if timing_cache is not None and flavour is Backend.TENSORRT else None
    try:
        with _plugins(flavour, kernels):
            network = backend.network_from_onnx_path(str(onnx_path), strongly_typed=_has_typed_flag(flavour))
        config = _config_loader(
            backend,
            flavour,
            profiles=[_polygraphy_profile(backend, network[1], profile) for profile in profiles],
            architectures=architectures,
            version_compatible=version_compatible,
            # Polygraphy warns about a cache that is not there yet.
            load_timing_cache=cache if cache is not None and Path(cache).exists() else None,
            progress_monitor=monitor,
        )
        # Counted first: building takes the network apart.
        plugins = _plugin_layers(load_flavour(flavour), network[1])
        return backend.engine_bytes_from_network(network, config=config, save_timing_cache=cache), plugins
    except (PolygraphyException, TypeError) as error:
        # TypeError is how the bindings say that TensorRT could not make an object, e.g. without CUDA.
        messages = [*take_plugin_errors(), *log_of(load_flavour(flavour))[0].take_errors()]
        raise _translated(error, messages, profiles) from error


def _plugins(flavour: Backend, kernels: Path | None) -> AbstractContextManager[None]:
    if flavour is Backend.TENSORRT:
        return plugins_with_kernels(load_flavour(flavour), kernels)
    if provide_library_link():
        return plugins_with_kernels(load_flavour(flavour), None)
    # Without the link the parser ends the process when it meets a plugin of ours, so it gets to know none.
    logger.warning("tensorrt_rtx was imported before hdexport, so that it cannot use plugins: import hdexport first.")
    return nullcontext()


def _plugin_layers(trt: ModuleType, network: Any) -> dict[str, int]:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    for layer in plugins:
        layer.__class__ = trt.IPluginV3Layer  # the bindings' way to reach what only plugin layers have
    return dict(Counter(layer.plugin.plugin_name for layer in plugins))


def _has_typed_flag(flavour: Backend) -> bool:
    # From version 11 on networks are always strongly typed, and a release may drop the flag.
    return hasattr(load_flavour(flavour).NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def _send_messages_to_logging(backend: ModuleType, flavour: Backend) -> None:
    from polygraphy.logger import G_LOGGER

    # Polygraphy has no option for the logger it gives to TensorRT; its own prints to stdout.
    backend.util.TRT_LOGGER = log_of(load_flavour(flavour))[1]
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.colors = False
    G_LOGGER.module_severity = G_LOGGER.WARNING
    # What Polygraphy logs as an error it raises too, and so do we.
    logging.getLogger("Polygraphy").addFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _polygraphy_profile(backend: ModuleType, network: Any, shape: ProfileShape) -> Any:
    profile = backend.Profile()
    smallest, best, largest = zip(shape.batch, shape.tokens, strict=True)
    for index in range(network.num_inputs):
        profile.add(network.get_input(index).name, smallest, best, largest)
    return profile


def _config_loader(
    backend: ModuleType, flavour: Backend, *, architectures: Sequence[str], version_compatible: bool, **options: Any
) -> Any:
    if flavour is Backend.TENSORRT:
        if version_compatible:
            options |= {"version_compatible": True, "exclude_lean_runtime": True}
        return backend.CreateConfig(**options)
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

    capabilities = [(int(name[2:-1]), int(name[-1])) for name in architectures]
    return CreateConfigRTX(compute_capabilities=capabilities or None, **options)


def _translated(error: Exception, messages: Sequence[str], profiles: Sequence[ProfileShape]) -> EngineError:
    """What TensorRT complained about, and what to do."""
    text = "\n".join(messages) or str(error)
    complaint = _PROFILE_COMPLAINT.search(text)
    if complaint:
        profile = profiles[int(complaint[1])]
        return EngineError(
            f"The graph cannot take the profile for {_range(profile.batch)} sequences of "
            f"{_range(profile.tokens)} tokens: {complaint[2].strip()}\n"
            f"Build with --max-len {profile.tokens[2]} or more, or give shorter --profiles."
        )
    if _NO_FUSED_ATTENTION in text:
        return EngineError(
            "TensorRT has no fused attention for this precision and size of head.\n"
            "Build with --fp16 or --bf16, or without an engine: --target onnx"
        )
    return EngineError(f"TensorRT did not build the engine: {text}\nBuild without it: --target onnx")


def _range(values: tuple[int, int, int]) -> str:
    return f"{values[0]} to {values[2]}"
