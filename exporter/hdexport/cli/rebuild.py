"""Rebuild the engines of a bundle for this machine's GPU and libraries, or add graphs or kernels to a bundle.

The command needs no checkpoint. Options default to the values of the bundle's engine. The bundle is replaced when the
new one is complete; after an error it is unchanged. Compare added graphs with hdexport verify.
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from hdexport.cli.arguments import (
    add_engine_arguments,
    add_int8_arguments,
    engine_options,
    int8_options,
    local_path,
    reject_engine_options,
)
from hdexport.cli.process import outlive_readers, whole_or_nothing
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import InputError

if TYPE_CHECKING:
    from hdruntime.bundle.manifest import Backend
    from hdruntime.bundle.reader import Bundle

SUMMARY = "rebuild engines or kernels for another GPU or library, or add graphs for CPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hdexport.graph.targets.registry import ONNX, graph_targets, target_names, targets

    of_graphs = [name for name in graph_targets(targets()) if name != ONNX]
    parser.add_argument("bundle", metavar="BUNDLE", type=local_path, help="directory of a bundle")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=local_path,
        help="directory of the new bundle (default: replace BUNDLE)",
    )
    parser.add_argument("--force", action="store_true", help="replace the bundle at OUT")
    parser.add_argument(
        "--target",
        action="append",
        choices=target_names(),
        help=f"engine to build; {' or '.join(of_graphs)} adds its graphs; {ONNX} with --sm adds kernels for ONNX "
        f"Runtime; repeatable (default: the engines of the bundle; without engines auto, with --sm {ONNX}, with "
        "--int8 none)",
    )
    add_int8_arguments(parser)
    add_engine_arguments(parser.add_argument_group("engines"))


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.progress import TerminalProgress

    outlive_readers()
    output = options.output or options.bundle
    with whole_or_nothing(output), TerminalProgress() as progress:
        progress.step("Starting")
        from hdexport.engines.build import previous_engines
        from hdexport.graph.targets.registry import ONNX, chosen_targets, graph_targets, targets_named
        from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
        from hdexport.rebuild import RebuildOptions, rebuild
        from hdruntime.bundle.reader import open_bundle

        bundle = open_bundle(options.bundle, check_files=False)
        int8 = int8_options(options)
        # Graphs are added by name alone.
        targets = graph_targets(chosen_targets([name for name in options.target or () if name != "auto"]))
        adds_graphs = bool(targets) or int8 is not None
        only_kernels = not adds_graphs and options.sm is not None and not bundle.manifest.engines
        named = options.target or ([ONNX] if only_kernels else None)
        variants = _variants(named, bundle, adds_graphs=adds_graphs)
        adds_kernels = not variants and ONNX in (named or ())
        if adds_kernels:
            kernels = ["sm", *(["attention_impl"] if options.attention_impl != AttentionImpl.NATIVE else [])]
            reject_engine_options(options, why="--sm adds kernels for ONNX Runtime", kernels=kernels)
            if options.sm is None:
                raise InputError(
                    f"--target {ONNX} adds kernels for the GPUs that --sm names, and there is no --sm.",
                    hint="Give for example --sm 90.",
                )
        elif not variants:
            reject_engine_options(options, why="only graphs for CPUs are added")
        manifest = rebuild(
            RebuildOptions(
                bundle=options.bundle,
                output=output,
                engines=engine_options(
                    options,
                    variants,
                    max_len=bundle.manifest.max_len,
                    one_profile=False,
                    previous=None if adds_kernels else previous_engines(bundle, variants),
                ),
                targets=targets,
                int8=int8,
                force=options.force,
                command=options.command_line,
            ),
            progress,
        )
    for engine in manifest.engines:
        print(f"{output / engine.file}: {engine.variant} {engine.version}, {', '.join(engine.architectures)}")
    if adds_kernels:
        print(f"{output / KERNELS_FOLDER}: {', '.join(manifest.kernel_architectures)}")
    if targets or int8 is not None:
        lowerings = {lowering for target in targets_named(targets) for lowering in target.lowerings}
        written = [
            graph.file
            for graph in manifest.graphs
            if (int8 is not None if graph.dtype == "int8" else graph.lowering in lowerings)
        ]
        print(f"{', '.join(written)}: not yet verified")
        print(f"Compare with PyTorch: hdexport verify {shlex.quote(str(output))}")
    return 0


def _variants(targets: list[str] | None, bundle: Bundle, *, adds_graphs: bool) -> tuple[Backend, ...]:
    from hdexport.graph.targets.registry import ONNX, chosen_targets, variants_of

    if targets is None and adds_graphs:
        return ()
    if targets is None:
        targets = [engine.variant.replace("_", "-") for engine in bundle.manifest.engines] or ["auto"]
    variants = variants_of(chosen_targets(targets))
    if not variants and not adds_graphs and ONNX not in targets:
        raise InputError(
            "No engine would be built: no library can build one here.", hint="See what is missing: hdexport doctor"
        )
    return variants
