"""Compare a bundle with PyTorch over a grid of lengths, batches and paddings, and record the outcome in it."""

from __future__ import annotations

import argparse

SUMMARY = "compare a bundle with PyTorch at many lengths"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's directory")
    parser.add_argument(
        "--model", help="the checkpoint it was built from (default: where the bundle says it came from)"
    )
    parser.add_argument(
        "--longest",
        metavar="TOKENS",
        help="check no longer inputs than that (default: 8192; PyTorch takes minutes for more)",
    )
    parser.add_argument("--allow-pickle", action="store_true", help="also read weights stored as a pickle (.bin)")


def run(options: argparse.Namespace) -> int:
    """Run the command; 1 if a check failed."""
    import dataclasses
    from pathlib import Path

    from hdexport.cli.progress import TerminalProgress
    from hdexport.cli.values import whole_number
    from hdruntime.bundle import open_bundle, write_manifest

    with TerminalProgress() as progress:
        progress.step("Opening the bundle")
        bundle = open_bundle(Path(options.bundle))
        progress.step("Loading PyTorch's model")
        from hdexport.checkpoint import find_checkpoint
        from hdexport.verify import LONGEST_CHECKED, reference_of, summary, verify_bundle

        longest = LONGEST_CHECKED if options.longest is None else whole_number("--longest", options.longest)
        checkpoint = find_checkpoint(options.model or bundle.manifest.made_by["source"])
        reference = reference_of(bundle, checkpoint, allow_pickle=options.allow_pickle)
        progress.step("Verifying against PyTorch")
        checks = verify_bundle(bundle, reference, longest=longest, thorough=True, report=progress.result)
        found = summary(checks)
        write_manifest(bundle.path, dataclasses.replace(bundle.manifest, verification=found))
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    return 0 if found["passed"] else 1
