"""Builds the engines of a bundle and their kernels from its portable graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from hdexport.graph.targets.tensorrt.lowering import AttentionImpl, tensorrt_graph
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdexport.graph.targets.tensorrt.plugin_nodes import own_shapes, plugin_nodes
from hdexport.graph.targets.tensorrt.profiles import default_profiles, with_memory
from hdexport.lowering.kernel_nodes import kernel_node
from hdexport.support.progress import Progress
from hdplugins import ONNX_DOMAIN
from hdplugins.tensorrt.plugins import plugin_operators
from hdruntime.backends.tensorrt.engine_metadata import read_engine_metadata
from hdruntime.bundle.manifest import Backend, EngineFile, KernelNode, Manifest, ProfileShape
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import InputError, Setting
from hdruntime.gpu.driver import gpus
from hdruntime.optional import is_installed

logger = logging.getLogger(__name__)

_ENGINES_FOLDER = "engines"
"""Folder of a bundle with one engine for each TensorRT variant, and with the engine metadata."""

_LOWERED_FILE = "tensorrt.onnx"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engines are built, and how.

    Attributes:
        variants: TensorRT variants to build an engine for; empty for no engine.
        attention_impl: which code computes attention that has kernels; None for what a bundle that is rebuilt has, and
            for ``AttentionImpl.AUTO`` in a new one.
        profiles: optimisation profiles of every engine, whose sizes of recurrent states come from the bundle; empty for
            those of `default_profiles`.
        architectures: GPU architectures of TensorRT-RTX engines and of kernels, e.g. ``("sm86", "sm89")``; empty for
            TensorRT-RTX's default and this machine's GPUs.
        version_compatible: build TensorRT engines that later versions and the lean runtime also run.
    """

    variants: tuple[Backend, ...] = ()
    attention_impl: AttentionImpl | None = None
    profiles: tuple[ProfileShape, ...] = ()
    architectures: tuple[str, ...] = ()
    version_compatible: bool = False

    def chosen(self, nodes: Sequence[KernelNode]) -> tuple[KernelNode, ...]:
        """The nodes that kernels compute in ONNX Runtime, out of the nodes that kernels can compute."""
        if self.attention_impl is AttentionImpl.PLUGIN:
            return tuple(replace(node, architectures=None) for node in nodes)
        if self.attention_impl is AttentionImpl.NATIVE:
            return ()
        return tuple(node for node in nodes if node.architectures != ())


class EngineBuilder:
    """Builds engines. Engines that cannot be built on this machine are rejected before any work is done; see
    `EngineTarget`."""

    def __init__(self, options: EngineOptions) -> None:
        if options.version_compatible and options.variants and Backend.TENSORRT not in options.variants:
            raise InputError(
                Setting("version_compatible"),
                " is for TensorRT engines; only the version that built a TensorRT-RTX engine runs it.",
                hint=("Leave it out, or add ", Setting("targets", "tensorrt"), "."),
            )
        self._options = options
        self._targets = [EngineTarget(variant, options.architectures) for variant in options.variants]

    def build(
        self, portable: ir.Model, directory: Path, *, manifest: Manifest, progress: Progress
    ) -> tuple[EngineFile, ...]:
        """Build the engines and write them, their metadata and the kernels of their plugins into a bundle.

        The portable graph is read from the bundle's directory, where its weights lie. The manifest is the bundle's,
        engines and files aside.
        """
        if not self._targets:
            return ()
        from hdexport.graph.targets.tensorrt.builder import build_engine
        from hdexport.graph.targets.tensorrt.kernels import write_kernels

        dtype = manifest.dtype
        chosen = self._options.profiles or default_profiles(manifest)
        profiles = with_memory(chosen, most=manifest.max_memory)
        longest = max(profile.tokens[-1] for profile in profiles)
        impl = self._options.attention_impl or AttentionImpl.AUTO
        graph = tensorrt_graph(portable, dtype=dtype, attention_impl=impl, longest=longest)
        architectures = sorted({name for target in self._targets for name in target.architectures})
        has_kernels = write_kernels(
            [kernel_node(node, own_shapes(node)) for node in plugin_nodes(graph)],
            directory,
            dtype=dtype,
            architectures=architectures,
            progress=progress.step,
        )
        # The lowered graph shares the weights beside it. TensorRT reads it once; the bundle does not keep it.
        lowered = directory / _LOWERED_FILE
        ir.save(graph, lowered)
        engines = []
        for target in self._targets:
            variant = target.variant
            progress.step(f"Building the {variant} engine, {len(profiles)} profiles")
            engine = build_engine(
                lowered,
                directory / _ENGINES_FOLDER / f"{variant}.engine",
                target,
                bundle=directory,
                kernels=directory / KERNELS_FOLDER if has_kernels else None,
                profiles=profiles,
                precision=dtype,
                version_compatible=self._options.version_compatible and variant is Backend.TENSORRT,
                progress=progress.detail,
            )
            engines.append(engine)
        lowered.unlink()
        return tuple(engines)

    def write_kernels(
        self, directory: Path, *, manifest: Manifest, progress: Progress, architectures: Sequence[str] = ()
    ) -> None:
        """Write the kernels by which ONNX Runtime computes attention on a GPU, the kernels of engines included.

        The kernels are for `architectures` and the architectures of the options, or else for this machine's GPUs where
        kernels support them.
        """
        from hdexport.graph.targets.tensorrt.kernels import write_kernels

        nodes, requested = manifest.kernel_nodes, {*self._options.architectures, *architectures}
        if requested and not self._targets and not any(node.is_for(name) for node in nodes for name in requested):
            progress.result((
                f"No attention kernel was compiled for {', '.join(sorted(requested))}: ONNX Runtime's native operators "
                "are used there. To compile the kernels, build with ",
                Setting("attention_impl", "plugin"),
                ".",
            ))  # fmt: skip
        if not nodes:
            return
        write = functools.partial(write_kernels, nodes, directory, dtype=manifest.dtype, progress=progress.step)
        if requested:
            write(architectures=sorted(requested))
        if not self._options.architectures and is_installed("triton"):
            here = {gpu.architecture for gpu in gpus()} - requested
            try:
                write(architectures=sorted(here))
            except InputError as error:
                logger.info("no kernels for this machine's GPUs: %s", error)


def previous_engines(bundle: Bundle, variants: Sequence[Backend]) -> EngineOptions | None:
    """Options of the build of the bundle's engine of one of these variants, or of its first engine; None without one.

    GPU architectures are the default: engines are rebuilt for another GPU.
    """
    engines = bundle.manifest.engines
    if not engines:
        return None
    engine = next((engine for engine in engines if engine.variant in variants), engines[0])
    has_plugins = bool(read_engine_metadata(bundle, engine).plugins)
    could_have = {f"{ONNX_DOMAIN}::{operator.name}" for operator in plugin_operators()} & set(bundle.manifest.operators)
    native = bool(could_have) and not has_plugins
    return EngineOptions(
        attention_impl=AttentionImpl.NATIVE if native else None,
        profiles=engine.profiles,
        version_compatible=engine.version_compatible and Backend.TENSORRT in variants,
    )
