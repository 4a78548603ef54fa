"""Compare a bundle with PyTorch over a grid of lengths, batches and paddings, and record the outcome in it.

The command prints a table with one row per graph, and the reasons of skipped cases; -v lists each case. The exit code
is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import (
    PRECISIONS,
    add_trust_arguments,
    add_verify_memory_argument,
    local_path,
    path_or_url,
    trust_of,
    whole_number,
)
from hdexport.cli.flags import flag
from hdexport.cli.process import outlive_readers
from hdexport.support.process_settings import let_threads_sleep
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError, write

if TYPE_CHECKING:
    from hdruntime.bundle.reader import Bundle

SUMMARY = "compare a bundle's outputs with PyTorch's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=local_path, help="directory of a bundle")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=path_or_url,
        help="checkpoint that the bundle was built from (default: the commit on the Hub in the manifest, or the "
        "directory of that name in the current directory or beside the bundle)",
    )
    parser.add_argument(
        "--longest",
        metavar="TOKENS",
        type=whole_number,
        help="maximum input length to compare (default: 8192; PyTorch takes minutes for longer inputs)",
    )
    parser.add_argument(
        "--grid",
        choices=["full", "quick"],
        default="full",
        help="cases to compare: full (default), every length with every batch and padding; quick, about ten per graph",
    )
    parser.add_argument(
        "--precision",
        choices=[*(each for each in PRECISIONS if each != "auto"), "all"],
        help="precision on the CPU (default: float32; also bfloat16 if the bundle was built with --bf16 or --fp16 "
        "and a backend computes in bfloat16 on this CPU; also int8 if the bundle has int8 graphs); "
        "all: each that runs here",
    )
    parser.add_argument(
        "--backend",
        choices=backend_names(),
        help="compare only the graphs or engines of this backend (default: all that run here)",
    )
    add_verify_memory_argument(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--json", action="store_true", help="print the table, each check and each skipped case as one JSON object"
    )
    output.add_argument("-q", "--quiet", action="store_true", help="print failed cases only")
    add_trust_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.progress import TerminalProgress
    from hdexport.support.bundle_writer import write_manifest
    from hdruntime.bundle.reader import open_bundle
    from hdruntime.bundle.verification import Status

    outlive_readers()
    let_threads_sleep()
    listed = () if options.json else tuple(Status) if options.verbose else (Status.FAIL,)
    with TerminalProgress(listed=listed, shows_table=not (options.json or options.quiet)) as progress:
        progress.step("Opening the bundle")
        bundle = open_bundle(options.bundle)
        precisions = _precisions(bundle, options.precision)
        model = _model_of(bundle, options.model)
        progress.step(f"Loading PyTorch's model from {model}")
        from hdexport.checkpoint import find_checkpoint
        from hdexport.verify import verify_bundle, with_code, with_texts
        from hdexport.verify.fp16_overflow import check_fp16_overflow
        from hdexport.verify.grid import LONGEST_CHECKED, Grid
        from hdexport.verify.pytorch_reference import reference_of

        grid = Grid(options.grid)
        longest = options.longest or LONGEST_CHECKED
        reference = reference_of(bundle, find_checkpoint(model, trust=trust_of(options)))
        progress.step("Verifying against PyTorch")
        backend = options.backend
        verification = verify_bundle(
            bundle,
            reference,
            grid=grid,
            precisions=precisions,
            backend=backend,
            longest=longest,
            memory_bytes=options.verify_memory,
            progress=progress,
        )
        if backend is None:
            verification = with_texts(verification, bundle, reference, progress=progress)
            verification = with_code(verification, bundle.manifest, reference, progress=progress)
        fp16_overflow = check_fp16_overflow(bundle)
        passed = verification.passed and fp16_overflow.problem is None
        record = dataclasses.replace(verification.record(), passed=passed)
        progress.verified(record, fp16_overflow.record)
    if options.json:
        checks = [check.record() for check in verification.all_checks]
        print(json.dumps({**dataclasses.asdict(record), "problem": fp16_overflow.problem, "checks": checks}, indent=2))
    elif not options.quiet:
        print("".join(f"{write(hint, flag)}\n" for hint in verification.hints), end="")
    # After the findings are printed: a bundle may be read-only.
    manifest = dataclasses.replace(bundle.manifest, verification=record, fp16_overflow=fp16_overflow.record)
    write_manifest(bundle.path, manifest)
    fp16_overflow.require_passed()
    return 0 if verification.passed else 1


def _precisions(bundle: Bundle, asked: str | None) -> tuple[Precision, ...] | None:
    """The precisions to verify in; None for the bundle's own."""
    from hdexport.verify.graph_sets import check_precision

    if asked is None:
        return None
    if asked == "all":
        return tuple(precision for precision in Precision if precision is not Precision.AUTO)
    check_precision(bundle, Precision(asked))
    return (Precision(asked),)


def _model_of(bundle: Bundle, model: str | None) -> str | Path:
    from hdexport.checkpoint import is_hub_source, path_of_source

    if model is not None:
        return model
    source = bundle.manifest.made_by.get("source")
    path = path_of_source(source, bundle.path)
    if path is not None:
        return path
    if source is not None and is_hub_source(source):
        return source
    source = source or "a checkpoint that it does not name"
    raise InputError(
        f"The bundle {bundle.path} was built from {source}, which is not here.",
        hint=f"Name the checkpoint: hdexport verify {shlex.quote(str(bundle.path))} --model MODEL",
    )
