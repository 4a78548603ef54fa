"""Build a bundle from a Hugging Face checkpoint: longer positions, ONNX graphs, TensorRT engines, verified."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdexport.build import BuildOptions

SUMMARY = "build a bundle from a Hugging Face checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a checkpoint's directory, or organisation/name on the Hugging Face hub (default: the current "
        "directory if it holds a config.json, else the sample model all-MiniLM-L6-v2)",
    )
    parser.add_argument("-o", "--output", metavar="BUNDLE", help="default: ./<model name>-<max_len>-<dtype>")
    parser.add_argument("--force", action="store_true", help="replace the bundle that is at the output")
    parser.add_argument("--task", default="auto", help="default: auto, what the checkpoint was made for")
    parser.add_argument("--allow-pickle", action="store_true", help="also read weights stored as a pickle (.bin)")
    _add_position_arguments(parser)
    types = parser.add_mutually_exclusive_group()
    types.add_argument("--fp16", action="store_true", help="weights and activations in float16")
    types.add_argument("--bf16", action="store_true", help="weights and activations in bfloat16")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the bundle with PyTorch")
    _add_engine_arguments(parser)


def _add_position_arguments(parser: argparse.ArgumentParser) -> None:
    positions = parser.add_argument_group("positions")
    positions.add_argument("--max-len", metavar="TOKENS", help="the longest input (default: what the checkpoint has)")
    positions.add_argument(
        "--positions",
        default="hierarchical",
        metavar="SCHEME",
        help="where longer positions come from: hierarchical (default), tile or none",
    )
    positions.add_argument(
        "--alpha", default="0.4", help="weight of the coarse position, hierarchical only (default: 0.4)"
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engines = parser.add_argument_group("engines")
    engines.add_argument(
        "--target",
        action="append",
        metavar="TARGET",
        help="auto (default), onnx, tensorrt or tensorrt-rtx; may be repeated. The ONNX graphs are always built; auto "
        "adds an engine for each TensorRT that is installed and can build here",
    )
    engines.add_argument(
        "--profiles",
        metavar="N,N,...",
        help="longest input of each profile (default: 128,512,1024,2048,... max_len)",
    )
    engines.add_argument("--batch", metavar="MIN:OPT:MAX", help="batch sizes of every profile (default: 1:1:8)")
    for bound in ("min", "opt", "max"):
        engines.add_argument(
            f"--{bound}Shapes",
            action="append",
            default=[],
            metavar="SHAPES",
            help=f"a profile's {bound} shapes as trtexec takes them, input_ids:1x128,attention_mask:1x128",
        )
    engines.add_argument("--sm", metavar="SM,SM,...", help="GPU architectures, e.g. 86,89 (default: all it supports)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from hdexport.cli.progress import TerminalProgress

    with TerminalProgress() as progress:
        # The first line shows before anything heavy is imported.
        progress.step("Starting")
        from hdexport.build import build

        build_options = _build_options(options)
        manifest = build(build_options, progress)
    size_bytes = sum(record.size_bytes for record in manifest.files.values())
    print(
        f"{build_options.output}: {manifest.name}, {manifest.task}, 1 to {manifest.max_len} tokens, {manifest.dtype}, "
        f"{size_bytes / 1e6:.1f} MB, {len(manifest.engines)} engine{'' if len(manifest.engines) == 1 else 's'}"
    )
    print(f"Look inside: hdexport inspect {build_options.output}")
    return 0


def _build_options(options: argparse.Namespace) -> BuildOptions:
    from hdexport.build import BuildOptions
    from hdexport.checkpoint import find_checkpoint
    from hdexport.cli.values import decimal_number, whole_number
    from hdexport.positions import scheme_from_name
    from hdexport.profiles import profiles_from_options
    from hdexport.targets import flavours_of_targets
    from hdexport.tasks import task_from_name

    model = options.model or _default_model()
    precision = "float16" if options.fp16 else "bfloat16" if options.bf16 else "float32"
    checkpoint = find_checkpoint(model)
    max_len = checkpoint.base_positions
    if options.max_len is not None:
        max_len = whole_number("--max-len", options.max_len)
    return BuildOptions(
        model=model,
        output=Path(options.output or f"{checkpoint.name}-{max_len}-{precision}"),
        max_len=max_len,
        precision=precision,
        task=task_from_name(options.task),
        scheme=scheme_from_name(options.positions),
        alpha=decimal_number("--alpha", options.alpha),
        flavours=flavours_of_targets(options.target or ["auto"]),
        profiles=profiles_from_options(
            max_len,
            profiles=options.profiles,
            batch=options.batch,
            min_shapes=options.minShapes,
            opt_shapes=options.optShapes,
            max_shapes=options.maxShapes,
        ),
        architectures=tuple(options.sm.split(",")) if options.sm else (),
        verify=not options.no_verify,
        force=options.force,
        allow_pickle=options.allow_pickle,
        command=shlex.join(["hdexport", *sys.argv[1:]]),
    )


def _default_model() -> Path:
    from hdexport.checkpoint import default_model

    path, reason = default_model()
    print(f"No MODEL was named; building {path.resolve()}: {reason}.", flush=True)
    return path
