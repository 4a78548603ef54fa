"""Attention by clipped distance on a CPU: a T5 encoder's bundle against Hugging Face's, or a NEZHA's against PyTorch.

Usage: python -m benchmarks.cpu.distances [--architecture t5] [--lengths 512 4096 8192] [--rounds 5] [--output FILE]

The models have base shape (hidden size 768, heads of 64, four layers) and random weights, on which speed does not
depend: T5's feed-forward 2048, gated, and NEZHA's 3072. Hugging Face's T5 runs as transformers loads it; NEZHA, which
transformers dropped, as our own module in PyTorch, with the bundle's tables: transformers 4 held tokens x
tokens x 64 numbers in every layer. The bundle must give PyTorch's answer.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.cpu.models import BUNDLE, HEAD_DIM, HUGGING_FACE, VOCAB_SIZE, add_shape_arguments, load, run_of_torch
from benchmarks.cpu.targets import Figure, Target, figures_of, random_ids, run_cases

_MODULE = "benchmarks.cpu.distances"
_TOLERANCE = 1e-3
_LATENCY_SHORT, _LATENCY, _MEMORY, _GROWTH = 0.9, 0.7, 0.2, 2.2


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--architecture", choices=("t5", "nezha"), default="t5")
    parser.add_argument("--lengths", type=int, nargs=3, default=(512, 4096, 8192), help="three, rising, in tokens")
    add_shape_arguments(parser)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def cases(short: int, middle: int, long: int) -> list[str]:
    """The timed cases."""
    compared = [f"{model} {tokens}" for tokens in (short, middle) for model in (BUNDLE, HUGGING_FACE)]
    return [*compared, f"{BUNDLE} {long}"]


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """The bundle's targets for 512, 4096 and 8192 tokens; memory grows with the text, and not its square."""
    return (
        Target(f"{BUNDLE} {short}", f"{HUGGING_FACE} {short}", Figure.LATENCY, _LATENCY_SHORT),
        Target(f"{BUNDLE} {middle}", f"{HUGGING_FACE} {middle}", Figure.LATENCY, _LATENCY),
        Target(f"{BUNDLE} {middle}", f"{HUGGING_FACE} {middle}", Figure.MEMORY, _MEMORY),
        Target(f"{BUNDLE} {long}", f"{BUNDLE} {middle}", Figure.MEMORY, _GROWTH),
    )


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, tokens = options.case.split()
    run = load(model, options.models) if model == BUNDLE else run_of_torch(_pytorch_model(options))
    return figures_of(run, random_ids(int(tokens), VOCAB_SIZE))


def _pytorch_model(options: argparse.Namespace) -> Any:
    import transformers

    from hdexport.families import family_of

    transformers.utils.logging.disable_progress_bar()
    family_of(options.architecture)  # transformers knows NEZHA's classes from then on
    loader = transformers.T5EncoderModel if options.architecture == "t5" else transformers.AutoModel
    return loader.from_pretrained(options.models / HUGGING_FACE)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from hdexport.build import BuildOptions, build

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    _new_model(options).save_pretrained(options.models / HUGGING_FACE)
    lengths = sorted(options.lengths)
    checkpoint, bundle = (options.models / name for name in (HUGGING_FACE, BUNDLE))
    build(BuildOptions(model=checkpoint, output=bundle, max_len=lengths[-1], verify=None))
    return {
        "cases": cases(*lengths),
        "targets": targets(*lengths),
        "same_answers": {f"{BUNDLE} {tokens}": (f"{HUGGING_FACE} {tokens}", _TOLERANCE) for tokens in lengths[:2]},
        **{name: getattr(options, name) for name in ("architecture", "hidden_size", "layers")},
    }


def _new_model(options: argparse.Namespace) -> Any:
    import transformers

    from hdexport.families.nezha.config import NezhaConfig
    from hdexport.families.nezha.model import NezhaModel

    heads = options.hidden_size // HEAD_DIM
    if options.architecture == "nezha":
        return NezhaModel(
            NezhaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=options.hidden_size,
                num_attention_heads=heads,
                num_hidden_layers=options.layers,
                intermediate_size=4 * options.hidden_size,
            )
        )
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=options.hidden_size,
            d_kv=HEAD_DIM,
            d_ff=2048 * options.hidden_size // 768,
            num_heads=heads,
            num_layers=options.layers,
            feed_forward_proj="gated-gelu",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
