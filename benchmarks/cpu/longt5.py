"""Local attention with sides on a CPU: a LongT5 encoder's bundle against Hugging Face's.

Usage: python -m benchmarks.cpu.longt5 [--attention transient-global] [--lengths 4096 8192] [--rounds 5] [--output FILE]

Both models have base shape (hidden size 768, heads of 64, gated feed-forward 2048, a radius of 127, sides of 16 tokens,
four layers) and random weights, on which speed does not depend. The bundle must give Hugging Face's answer.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.cpu.models import BUNDLE, HEAD_DIM, HUGGING_FACE, VOCAB_SIZE, add_shape_arguments, load, run_of_torch
from benchmarks.cpu.targets import Figure, Target, figures_of, random_ids, run_cases

_MODULE = "benchmarks.cpu.longt5"
_TOLERANCE = 1e-3
_LATENCY, _MEMORY, _GROWTH = 0.9, 0.35, 2.2


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attention", choices=("transient-global", "local"), default="transient-global")
    parser.add_argument("--lengths", type=int, nargs=2, default=(4096, 8192), help="two, rising, in tokens")
    add_shape_arguments(parser)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def cases(short: int, long: int) -> list[str]:
    """The timed cases."""
    return [f"{model} {tokens}" for tokens in (short, long) for model in (BUNDLE, HUGGING_FACE)]


def targets(short: int, long: int) -> tuple[Target, ...]:
    """The bundle's at both lengths; memory grows with the text, and not its square."""
    against = [
        Target(f"{BUNDLE} {tokens}", f"{HUGGING_FACE} {tokens}", figure, most)
        for tokens in (short, long)
        for figure, most in ((Figure.LATENCY, _LATENCY), (Figure.MEMORY, _MEMORY))
    ]
    return (*against, Target(f"{BUNDLE} {long}", f"{BUNDLE} {short}", Figure.MEMORY, _GROWTH))


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, tokens = options.case.split()
    if model == BUNDLE:
        run = load(model, options.models)
    else:
        run = run_of_torch(transformers.LongT5EncoderModel.from_pretrained(options.models / HUGGING_FACE))
    return figures_of(run, random_ids(int(tokens), VOCAB_SIZE))


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from hdexport.build import BuildOptions, build

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LongT5Config(
        vocab_size=VOCAB_SIZE,
        d_model=options.hidden_size,
        d_kv=HEAD_DIM,
        d_ff=2048 * options.hidden_size // 768,
        num_heads=options.hidden_size // HEAD_DIM,
        num_layers=options.layers,
        feed_forward_proj="gated-gelu",
        encoder_attention_type=options.attention,
    )
    checkpoint, bundle = (options.models / name for name in (HUGGING_FACE, BUNDLE))
    transformers.LongT5EncoderModel(config).save_pretrained(checkpoint)
    lengths = sorted(options.lengths)
    build(BuildOptions(model=checkpoint, output=bundle, max_len=lengths[-1], verify=None))
    return {
        "cases": cases(*lengths),
        "targets": targets(*lengths),
        "same_answers": {f"{BUNDLE} {tokens}": (f"{HUGGING_FACE} {tokens}", _TOLERANCE) for tokens in lengths},
        **{name: getattr(options, name) for name in ("attention", "hidden_size", "layers")},
    }


if __name__ == "__main__":
    sys.exit(main())
