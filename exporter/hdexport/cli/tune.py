"""Train longer positions on long texts without labels, and write a Hugging Face checkpoint.

By default only the new rows of the position table are trained, so that outputs for shorter texts stay the same. After
a kill the same command continues. Then build a bundle of the new checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import shlex
from pathlib import Path

from hdexport.cli.arguments import (
    add_attention_arguments,
    add_attention_scale_argument,
    add_new_checkpoint_arguments,
    add_position_arguments,
    add_texts_arguments,
    add_tokenizer_argument,
    options_as,
    trust_of,
    whole_number,
)
from hdexport.cli.process import interruption_explained, outlive_readers

SUMMARY = "train longer positions on long texts without labels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_new_checkpoint_arguments(parser)
    add_texts_arguments(parser)
    parser.add_argument(
        "--chunk-tokens",
        metavar="TOKENS",
        type=whole_number,
        help="maximum tokens of a training chunk (default: three times the checkpoint's positions). Time grows "
        "faster than linearly; positions beyond it learn only the shift that all new positions share",
    )
    parser.add_argument("--restart", action="store_true", help="discard the state of an unfinished run")
    add_tokenizer_argument(parser)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--loss",
        choices=["auto", "contrast", "distill", "mlm"],
        default="auto",
        help="contrast: a sentence taken from a text must match the rest of that text; distill: token states match "
        "those of the checkpoint in windows of trained positions; mlm: masked language modelling; auto (default): "
        "contrast for embeddings, mlm if the checkpoint has the head, else distill",
    )
    training.add_argument(
        "--train",
        choices=["positions", "all"],
        default="positions",
        help="weights to train: positions (default), the new rows of the position table, which leaves outputs for "
        "shorter texts unchanged; all",
    )
    training.add_argument(
        "--minutes", metavar="N", type=float, help="training time in minutes (default: 30, unless --steps is given)"
    )
    training.add_argument(
        "--steps", metavar="N", type=whole_number, help="maximum number of optimizer steps (default: no limit)"
    )
    training.add_argument(
        "--batch-tokens",
        metavar="N",
        type=whole_number,
        default=8192,
        help="approximate tokens per optimizer step; gradients are accumulated text by text (default: 8192)",
    )
    training.add_argument(
        "--lr",
        dest="learning_rate",
        metavar="RATE",
        type=float,
        help="maximum learning rate (default: 5e-3 for positions, 2e-5 for all)",
    )
    training.add_argument(
        "--seed",
        metavar="N",
        type=functools.partial(whole_number, minimum=0),
        default=0,
        help="random seed (default: 0)",
    )
    training.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="recompute activations: less memory, about a third more time",
    )
    training.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device to train on; auto (default): a GPU if there is one",
    )
    positions = parser.add_argument_group("positions and attention")
    add_position_arguments(positions, alpha="0.05 for embeddings, else 0.4, before training")
    add_attention_scale_argument(positions)
    add_attention_arguments(
        positions, effect="train through sparse attention in place of dense (default: the model's own)."
    )


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.progress import TerminalProgress

    outlive_readers()
    with interruption_explained(lambda: _kept(options.output)), TerminalProgress() as progress:
        progress.step("Starting")
        from hdexport.tune.options import Loss, Trained, TuneOptions
        from hdexport.tune.run import tune
        from hdruntime.bundle.manifest import Scheme

        tuned = tune(
            options_as(
                TuneOptions,
                options,
                loss=None if options.loss == "auto" else Loss(options.loss),
                train=Trained(options.train),
                scheme=Scheme(options.positions),
                attention_options=vars(options),
                attention_scale=None if options.attention_scale == "auto" else options.attention_scale,
                trust=trust_of(options),
                command=options.command_line,
            ),
            progress,
        )
    outcome, extension = tuned.outcome, tuned.extension
    first, last = (sum(part) / len(part) for part in (outcome.losses[:10], outcome.losses[-10:]))
    print(f"{options.output}: {options.max_len} positions from {extension.base}, {tuned.trained_values} values trained")
    print(
        f"{outcome.documents} texts in {outcome.steps} steps, {outcome.seconds / 60:.1f} minutes; "
        f"loss {first:.4g} to {last:.4g}"
    )
    attention = "" if extension.attention is None else f" --attention {shlex.quote(extension.attention)}"
    print(f"Next: hdexport build {shlex.quote(str(options.output))}{attention}")
    return 0


def _kept(output: Path) -> str:
    from hdexport.tune.training import kept_steps

    steps = kept_steps(output)
    return "nothing was kept" if steps is None else f"{steps} steps are kept; the same command continues after them"
