"""Compare a bundle with PyTorch over a grid of lengths, batches and paddings, and record the outcome in it.

One line per check is printed, with its error and its tolerance; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import add_pickle_argument, one_of, whole_number
from hdruntime.errors import InputError, VerificationError

if TYPE_CHECKING:
    from hdruntime.bundle.reader import Bundle

SUMMARY = "compare a bundle with PyTorch at many lengths"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the bundle's directory")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="the checkpoint it was built from (default: the commit on the hub that the bundle names, or the directory "
        "of the name that it gives, here or beside the bundle)",
    )
    parser.add_argument(
        "--longest",
        metavar="TOKENS",
        help="check no longer inputs than that (default: 8192; PyTorch takes minutes for more)",
    )
    parser.add_argument(
        "--grid",
        default="full",
        help="full (default): every length with every batch and padding; quick: about ten cases for each graph",
    )
    add_pickle_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; 1 if a check failed."""
    import dataclasses

    from hdexport.cli.progress import TerminalProgress
    from hdexport.support.openmp import let_threads_sleep
    from hdruntime.bundle.reader import open_bundle
    from hdruntime.bundle.writer import write_manifest

    let_threads_sleep()
    with TerminalProgress() as progress:
        progress.step("Opening the bundle")
        bundle = open_bundle(options.bundle)
        model = _model_of(bundle, options.model)
        progress.step(f"Loading PyTorch's model from {model}")
        from hdexport.checkpoint import find_checkpoint
        from hdexport.verify import verify_bundle
        from hdexport.verify.grid import LONGEST_CHECKED, Grid
        from hdexport.verify.half_range import check_half_range
        from hdexport.verify.pytorch_reference import reference_of

        grid = Grid(one_of("--grid", options.grid, [grid.value for grid in Grid]))
        longest = LONGEST_CHECKED if options.longest is None else whole_number("--longest", options.longest)
        reference = reference_of(
            bundle, find_checkpoint(model, allow_pickle=options.allow_pickle), allow_pickle=options.allow_pickle
        )
        progress.step("Verifying against PyTorch")
        found = verify_bundle(bundle, reference, grid=grid, longest=longest, report=progress.result)
        half_range = check_half_range(bundle, report=progress.result)
        record = found.record()
        record["passed"] = found.passed and half_range.problem is None
        manifest = dataclasses.replace(bundle.manifest, verification=record, half_range=half_range.record)
        write_manifest(bundle.path, manifest)
    failed = sum(not check.passed for check in found.checks)
    print(f"{len(found.checks) - failed} of {len(found.checks)} checks passed")
    if half_range.problem is not None:
        raise VerificationError(half_range.problem)
    return 0 if found.passed else 1


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
        f"The bundle {bundle.path} was built from {source}, which is not here.\n"
        f"Name the checkpoint: hdexport verify {bundle.path} --model MODEL"
    )
