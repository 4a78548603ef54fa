"""The engines of a bundle and their kernels, made from its portable graph."""

from __future__ import annotations

__all__ = ["ENGINES_FOLDER", "EngineOptions", "build_engines", "check_engine_options"]

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.graph.lowering.tensorrt import AttentionImpl
from hdexport.support.progress import Progress
from hdruntime.bundle.manifest import Backend, Dtype, EngineFile, ProfileShape
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import InputError

if TYPE_CHECKING:
    import onnx_ir

ENGINES_FOLDER = "engines"
"""In a bundle: an engine a flavour, each with its passport."""

_LOWERED_FILE = "tensorrt.onnx"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engines to build, and how.

    Attributes:
        flavours: TensorRT flavours to build an engine for; none for no engine.
        attention_impl: who computes windowed attention, our plugin or TensorRT itself.
        profiles: optimisation profiles of every engine.
        architectures: GPU architectures of TensorRT-RTX engines, e.g. ``("sm86", "sm89")``; none for its default.
        version_compatible: make TensorRT engines that later versions and its lean runtime run, too.
    """

    flavours: tuple[Backend, ...] = ()
    attention_impl: AttentionImpl = AttentionImpl.PLUGIN
    profiles: tuple[ProfileShape, ...] = ()
    architectures: tuple[str, ...] = ()
    version_compatible: bool = False


def check_engine_options(options: EngineOptions) -> None:
    """Refuse what cannot be built here before anything is.

    Raises:
        MissingDependencyError, EngineError, InputError: as `hdexport.engines.tensorrt_builder.check_target`.
    """
    if not options.flavours:
        return
    from hdexport.engines.tensorrt_builder import check_target

    for flavour in options.flavours:
        check_target(flavour, architectures=options.architectures)
    if options.version_compatible and Backend.TENSORRT not in options.flavours:
        raise InputError(
            "--version-compatible is for TensorRT engines; one of TensorRT-RTX runs with the version that built it.\n"
            "Leave it out, or add --target tensorrt."
        )


def build_engines(
    portable: onnx_ir.Model, directory: Path, options: EngineOptions, *, dtype: Dtype, progress: Progress
) -> tuple[EngineFile, ...]:
    """Build the engines and write them, their passports and the kernels of their plugins into a bundle.

    Args:
        portable: the bundle's portable graph, read from ``directory``, where its weights lie.
        directory: of the bundle.
        options: which engines.
        dtype: of the graph's weights: ``float32``, ``float16`` or ``bfloat16``.
        progress: told what is done.

    Raises:
        HdexportError: an engine cannot be built.
    """
    if not options.flavours:
        return ()
    import onnx_ir as ir

    from hdexport.engines.kernels import write_kernels
    from hdexport.engines.tensorrt_builder import build_engine, target_architectures
    from hdexport.graph.lowering.tensorrt import tensorrt_graph

    graph = tensorrt_graph(portable, dtype=dtype, attention_impl=options.attention_impl)
    of_flavours = (target_architectures(name, architectures=options.architectures) for name in options.flavours)
    architectures = sorted({name for names in of_flavours for name in names})
    kernels = write_kernels(graph, directory, dtype=dtype, architectures=architectures, progress=progress.step)
    # Beside the weights, which it shares; TensorRT reads it once and the bundle has no use for it.
    lowered = directory / _LOWERED_FILE
    ir.save(graph, lowered)
    (directory / ENGINES_FOLDER).mkdir(exist_ok=True)
    engines = []
    for flavour in options.flavours:
        progress.step(f"Building the {flavour.value} engine, {len(options.profiles)} profiles")
        engines.append(
            build_engine(
                lowered,
                directory / ENGINES_FOLDER / f"{flavour.value}.engine",
                bundle=directory,
                kernels=directory / KERNELS_FOLDER if kernels else None,
                flavour=flavour,
                profiles=options.profiles,
                precision=dtype,
                architectures=options.architectures,
                version_compatible=options.version_compatible and flavour is Backend.TENSORRT,
                progress=progress.detail,
            )
        )
    lowered.unlink()
    return tuple(engines)
