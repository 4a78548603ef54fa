"""Sliding windows on a CPU: a Longformer's bundle against Hugging Face's Longformer and dense attention of that shape.

Usage: python -m benchmarks.cpu.window [--tokens 2048 4096 8192] [--rounds 5] [--output FILE]

The models have the shape of Longformer-base with four layers, 256 tokens on each side, and random weights, on which
speed does not depend. The first token is global, Hugging Face's default. "dense-sdpa" is a BERT of that shape in
PyTorch: the alternative without windows. The bundle must give Hugging Face's answer, in ONNX Runtime and in OpenVINO,
which is also timed in bfloat16 at the longer lengths.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from benchmarks.cpu.models import (
    BUNDLE,
    DENSE,
    HUGGING_FACE,
    OPENVINO,
    VOCAB_SIZE,
    add_shape_arguments,
    load,
    openvino_cases,
    openvino_targets,
    save_models,
)
from benchmarks.cpu.targets import Figure, Target, figures_of, random_ids, run_cases

_TOLERANCE = 1e-3


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs=3, default=(2048, 4096, 8192), help="three lengths, rising")
    add_shape_arguments(parser)
    parser.add_argument("--window", type=int, default=256, help="tokens on each side; Longformer counts both")
    return run_cases("benchmarks.cpu.window", parser, _case_figures, _comparison)


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """The bundle's targets for 2048, 4096 and 8192 tokens."""
    return (
        Target(f"bundle {middle}", f"hugging-face {middle}", Figure.LATENCY, 0.5),
        Target(f"bundle {middle}", f"dense-sdpa {middle}", Figure.LATENCY, 0.5),
        Target(f"bundle {long}", f"dense-sdpa {long}", Figure.LATENCY, 0.45),
        Target(f"bundle {long}", f"bundle {short}", Figure.LATENCY, 4.6),
        Target(f"bundle {middle}", f"hugging-face {middle}", Figure.MEMORY, 0.5),
        Target(f"bundle {long}", f"hugging-face {long}", Figure.MEMORY, 0.5),
        *openvino_targets(middle, long),
    )


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, tokens = options.case.split()
    ids = random_ids(int(tokens), VOCAB_SIZE)
    # Hugging Face pads shorter pieces to the whole window, which takes time and warms up nothing more.
    return figures_of(load(model, options.models), ids, warm_up_tokens=2 * options.window)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import LongformerConfig

    lengths, window = sorted(options.tokens), options.window
    shape = {"hidden_size": options.hidden_size, "layers": options.layers}
    config_of = functools.partial(LongformerConfig, attention_window=2 * window, pad_token_id=1, sep_token_id=2)
    # Longformer's positions begin after the padding id, 1. It pads texts to a multiple of its window.
    save_models(options.models, config_of, **shape, longest=lengths[-1], rows=lengths[-1] + 2 * window + 2)
    return {
        "cases": [
            *(f"{model} {tokens}" for tokens in lengths for model in (BUNDLE, HUGGING_FACE, DENSE)),
            *openvino_cases(*lengths[1:]),
        ],
        "targets": targets(*lengths),
        "same_answers": {
            f"{model} {tokens}": (f"{HUGGING_FACE} {tokens}", _TOLERANCE)
            for model, compared in ((BUNDLE, lengths), (OPENVINO, lengths[1:]))
            for tokens in compared
        },
        **shape,
        "window": window,
    }


if __name__ == "__main__":
    sys.exit(main())
