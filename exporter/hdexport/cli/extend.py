"""Write a Hugging Face checkpoint with more positions, to fine-tune it on long texts.

Fine-tuning trains the new positions; then build a bundle. All other weights are copied bit for bit, and so are the
first rows of the position table, except with interpolate:static.
"""

from __future__ import annotations

import argparse
import shlex

from hdexport.cli.arguments import add_new_checkpoint_arguments, add_position_arguments, options_as, trust_of
from hdexport.cli.process import outlive_readers, whole_or_nothing

SUMMARY = "write a checkpoint with more positions, for fine-tuning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_new_checkpoint_arguments(parser)
    add_position_arguments(parser.add_argument_group("positions"), alpha="0.4, for training")


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.progress import TerminalProgress

    outlive_readers()
    with whole_or_nothing(options.output), TerminalProgress() as progress:
        progress.step("Starting")
        from hdexport.extend import ExtendOptions, extend
        from hdruntime.bundle.manifest import Scheme

        positions = extend(
            options_as(ExtendOptions, options, scheme=Scheme(options.positions), trust=trust_of(options)),
            progress,
        )
    alpha = "" if positions.alpha is None else f", alpha {positions.alpha:g}"
    print(f"{options.output}: {positions.rows} positions from {positions.base} ({positions.scheme}{alpha})")
    print(f"Fine-tune it on long texts, then: hdexport build {shlex.quote(str(options.output))}")
    return 0
