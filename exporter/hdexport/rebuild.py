"""Rebuilds a bundle's engines and kernels for another GPU, and adds graphs, without the checkpoint."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir

from hdexport.engines.build import EngineBuilder, EngineOptions
from hdexport.graph.bundle_graph import read_portable_graph
from hdexport.graph.targets.registry import targets_named
from hdexport.graph.targets.target import GraphRequest
from hdexport.lowering.kernel_nodes import kernel_records
from hdexport.quantize import Int8Options
from hdexport.quantize.bundle import quantize_bundle
from hdexport.support.bundle_writer import BUNDLE_DIRECTORY, seal
from hdexport.support.progress import Progress
from hdruntime.bundle.manifest import EngineFile, GraphFile, Manifest
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.staging import staged_directory
from hdruntime.bundle.verification import Skip, SkipCause, VerificationRecord
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import InputError, Message, Setting
from hdruntime.folders import require_utf8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RebuildOptions:
    """Which bundle is rebuilt, and how.

    Attributes:
        bundle: a bundle's directory.
        output: directory of the new bundle; the same directory replaces it.
        engines: which engines, and the architectures of kernels, for ONNX Runtime alone where no engine is built. The
            bundle's engines of other variants are kept.
        targets: names of targets whose graphs are added, or written again.
        int8: how the graphs for CPUs with int8 weights are made, in place of the bundle's; None keeps the bundle's.
        force: replace a bundle at `output` where that is another directory.
        command: the command line, for the record.
    """

    bundle: Path
    output: Path
    engines: EngineOptions = field(default_factory=EngineOptions)
    targets: tuple[str, ...] = ()
    int8: Int8Options | None = None
    force: bool = False
    command: str = ""


def rebuild(options: RebuildOptions, progress: Progress | None = None) -> Manifest:
    """Build engines and graphs from a bundle's portable graph; its other files and their verification stay.

    Graphs and engines that are written are not verified: the checkpoint is not read.

    Nothing changes before everything is built. A process that has the old bundle open keeps it.

    Returns:
        The manifest of the new bundle.

    Raises:
        BundleError: the bundle is missing or damaged.
        HdexportError: an engine cannot be built on this machine, int8 cannot be calibrated, or the bundle cannot be
            written.
    """
    progress = progress or Progress()
    engine_builder = EngineBuilder(options.engines)
    require_utf8(options.output)
    if options.int8 is not None:
        options.int8.check()
    in_place = options.output.resolve() == options.bundle.resolve()
    progress.step("Reading the bundle")
    bundle = open_bundle(options.bundle)
    with staged_directory(options.output, BUNDLE_DIRECTORY, force=options.force or in_place) as directory:
        kept = [engine for engine in bundle.manifest.engines if engine.variant not in options.engines.variants]
        graphs = _graphs_to_keep(bundle.manifest, options)
        only_kernels = bool(options.engines.architectures) and not options.engines.variants
        writes_kernels = only_kernels or bool(options.engines.variants)
        files = _files_to_keep(bundle, kept, graphs, keeps_kernels=bool(kept) or not writes_kernels)
        _copy(bundle, directory, files)
        manifest = bundle.manifest
        portable = read_portable_graph(bundle, directory=directory)
        if writes_kernels and options.engines.attention_impl is not None:
            nodes = options.engines.chosen(kernel_records(portable, dtype=manifest.dtype))
            manifest = dataclasses.replace(manifest, kernel_nodes=nodes)
        if only_kernels:
            _check_that_kernels_are_used(portable, manifest, options.engines)
        built = engine_builder.build(portable, directory, manifest=manifest, progress=progress)
        if writes_kernels:
            # Those of the bundle are compiled again: another version's may be others.
            engine_builder.write_kernels(
                directory,
                manifest=manifest,
                progress=progress,
                architectures=manifest.kernel_architectures,
            )
        for target in targets_named(options.targets):
            progress.step(f"Lowering for {target.title}")
            graphs += target.write(portable, directory, GraphRequest(manifest.dtype, manifest.num_layers))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made_by = manifest.made_by | {"rebuilt by": options.command, "rebuilt on": date}
        manifest = dataclasses.replace(
            manifest,
            graphs=tuple(graphs),
            engines=(*kept, *built),
            verification=_still_verified(manifest.verification, set(manifest.files).difference(files)),
            made_by=made_by,
        )
        manifest = seal(directory, manifest)
        if options.int8 is not None:
            manifest = quantize_bundle(Bundle(directory, manifest), options.int8, progress)
        progress.step("Writing the bundle")
        return manifest


def _check_that_kernels_are_used(portable: onnx_ir.Model, manifest: Manifest, engines: EngineOptions) -> None:
    if not any(node.is_for(name) for node in manifest.kernel_nodes for name in engines.architectures):
        architectures = Setting("architectures", engines.architectures)
        hint: Message = ("Build an engine, too: ", Setting("targets", "tensorrt-rtx"), " ", architectures)
        if kernel_records(portable, dtype=manifest.dtype):
            hint = ("Use the kernels: ", Setting("attention_impl", "plugin"), " ", architectures)
        raise InputError(
            architectures,
            " has nothing to compile: no engine is built, and no kernel computes the bundle's attention there.",
            hint=hint,
        )


def _graphs_to_keep(manifest: Manifest, options: RebuildOptions) -> list[GraphFile]:
    """All graphs but the ones that are written again; float graphs stay where int8 graphs do not."""
    replaced = {lowering for target in targets_named(options.targets) for lowering in target.lowerings}
    return [
        graph
        for graph in manifest.graphs
        if (options.int8 is None if graph.dtype == "int8" else graph.lowering not in replaced)
    ]


def _files_to_keep(
    bundle: Bundle, kept: Sequence[EngineFile], graphs: Sequence[GraphFile], *, keeps_kernels: bool
) -> list[str]:
    """All files but replaced graphs and engines, their metadata, and kernels that are written again."""
    dropped = {
        name for engine in bundle.manifest.engines if engine not in kept for name in (engine.file, engine.metadata)
    } | {graph.file for graph in bundle.manifest.graphs if graph not in graphs}
    return [
        name
        for name in bundle.manifest.files
        if name not in dropped and (keeps_kernels or not name.startswith(f"{KERNELS_FOLDER}/"))
    ]


def _still_verified(record: VerificationRecord | None, replaced: set[str]) -> VerificationRecord | None:
    """A verification without the checks of files that were replaced after the checks."""
    if record is None:
        return None
    stale = [name for name, graph in record.graphs.items() if not replaced.isdisjoint(graph.files)]
    return dataclasses.replace(
        record,
        graphs={name: graph for name, graph in record.graphs.items() if name not in stale},
        skipped=(*record.skipped, *(Skip(cause=SkipCause.REBUILT, graph=name) for name in stale)),
    )


def _copy(bundle: Bundle, directory: Path, names: Sequence[str]) -> None:
    for name in names:
        destination = directory / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        # No hard links: a write to the copy must not reach the bundle that is still in use.
        shutil.copyfile(bundle.file(name), destination)
    logger.info("%d files of %s are kept", len(names), bundle.path)
