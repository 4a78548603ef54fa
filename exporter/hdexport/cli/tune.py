"""Learn longer positions from long texts without labels, and write the checkpoint as a Hugging Face directory.

Only the rows after the checkpoint's are trained by default: shorter texts keep their answers. What is learnt is kept
beside the output until it is complete, and the same command continues after a kill. Build a bundle of the result.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from hdexport.cli.arguments import (
    add_attention_arguments,
    add_attention_scale_argument,
    add_position_arguments,
    add_revision_argument,
    add_tokenizer_argument,
    add_trust_arguments,
    local_path,
    path_or_url,
    trust_of,
    whole_number,
)
from hdexport.cli.process import interruption_explained, outlive_readers

SUMMARY = "learn longer positions from long texts without labels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=path_or_url,
        help="a checkpoint's directory, or organisation/name on the Hugging Face hub",
    )
    parser.add_argument(
        "--texts",
        metavar="PATH",
        type=local_path,
        required=True,
        help="a .jsonl, .csv, .tsv, .parquet or .txt file (a text per line), or a folder of such files, in which each "
        ".txt, .md and .rst file is one text; .gz and .zst, too",
    )
    parser.add_argument("--column", metavar="C", help="column that holds the texts (default: text)")
    parser.add_argument(
        "--max-len",
        metavar="TOKENS",
        type=whole_number,
        required=True,
        help="positions of the new checkpoint",
    )
    parser.add_argument(
        "--chunk-tokens",
        metavar="TOKENS",
        type=whole_number,
        help="longer texts are cut into chunks (default: three times the checkpoint's positions); time grows faster "
        "than this, and rows past it learn only what all new rows share",
    )
    parser.add_argument("-o", "--output", metavar="DIR", type=local_path, required=True, help="the directory to write")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that is at the output")
    parser.add_argument("--restart", action="store_true", help="discard what an unfinished run has kept")
    add_revision_argument(parser)
    add_trust_arguments(parser)
    add_tokenizer_argument(parser)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--loss",
        choices=["auto", "contrast", "distill", "mlm"],
        default="auto",
        help="contrast: a sentence that is taken out of a text finds it among all texts; distill: token states are "
        "those that the checkpoint gives in windows of trained positions; mlm: masked tokens are predicted; auto "
        "(default): contrast for embeddings, mlm where the checkpoint has that head, else distill",
    )
    training.add_argument(
        "--train",
        choices=["positions", "all"],
        default="positions",
        help="positions (default): the rows after the checkpoint's, so that shorter texts keep every bit of their "
        "answers; all: every weight",
    )
    training.add_argument(
        "--minutes", metavar="N", type=float, help="of training (default: 30, unless --steps is given)"
    )
    training.add_argument("--steps", metavar="N", type=whole_number, help="of the optimizer, at most")
    training.add_argument(
        "--batch-tokens",
        metavar="N",
        type=whole_number,
        default=8192,
        help="about how many tokens a step sees; their gradients are accumulated text by text (default: 8192)",
    )
    training.add_argument(
        "--lr", metavar="RATE", type=float, help="the highest learning rate (default: 5e-3 for positions, 2e-5 for all)"
    )
    training.add_argument(
        "--seed", metavar="N", type=lambda text: whole_number(text, least=0), default=0, help="(default: 0)"
    )
    training.add_argument(
        "--gradient-checkpointing", action="store_true", help="take less memory, and about a third more time"
    )
    training.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto (default): a GPU where there is one"
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
            TuneOptions(
                model=options.model,
                texts=options.texts,
                output=options.output,
                max_len=options.max_len,
                chunk_tokens=options.chunk_tokens,
                column=options.column,
                loss=None if options.loss == "auto" else Loss(options.loss),
                train=Trained(options.train),
                tokenizer=options.tokenizer,
                scheme=Scheme(options.positions),
                alpha=options.alpha,
                attention=options.attention,
                attention_options=vars(options),
                attention_scale=None if options.attention_scale == "auto" else options.attention_scale,
                minutes=options.minutes,
                steps=options.steps,
                batch_tokens=options.batch_tokens,
                rate=options.lr,
                seed=options.seed,
                gradient_checkpointing=options.gradient_checkpointing,
                device=options.device,
                revision=options.revision,
                force=options.force,
                restart=options.restart,
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
