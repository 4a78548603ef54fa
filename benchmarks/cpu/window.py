"""Sliding windows on a CPU: a Longformer's bundle against Hugging Face's Longformer and dense attention of that shape.

Usage: python -m benchmarks.cpu.window [--tokens 2048 4096 8192] [--rounds 5] [--output FILE]

The models have the shape of Longformer-base with four layers, 256 tokens on each side, and random weights, on which
speed does not depend. No token is global, Hugging Face's default. "dense-sdpa" is a BERT of that shape in
PyTorch: the alternative without windows. The bundle must give Hugging Face's answer in ONNX Runtime, and ONNX Runtime's
in OpenVINO, which is also timed in bfloat16 at the longer lengths. "sample-..." is the sample model at the middle
length, with dense attention and with that window.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu.models import (
    BUNDLE,
    DENSE,
    HUGGING_FACE,
    OPENVINO,
    OPENVINO_BFLOAT16,
    VOCAB_SIZE,
    add_shape_arguments,
    load,
    openvino_cases,
    openvino_targets,
    save_models,
)
from benchmarks.cpu.targets import Figure, Run, Target, figures_of, random_ids, run_cases

_TOLERANCE = 1e-3

_SAMPLE = {
    "sample-dense": ("dense", "onnxruntime", "float32"),
    "sample-windows": ("windows", "onnxruntime", "float32"),
    f"sample-{OPENVINO}": ("windows", "openvino", "float32"),
    f"sample-{OPENVINO_BFLOAT16}": ("windows", "openvino", "bfloat16"),
}
"""Case of the sample model -> its bundle, and the backend and precision that it is loaded with."""


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
        *(
            Target(f"sample-{model} {middle}", f"sample-{against} {middle}", Figure.CPU_TIME, most)
            for model, against, most in ((OPENVINO, "dense", 0.5), (OPENVINO_BFLOAT16, OPENVINO, 0.65))
            if f"sample-{model} {middle}" in sample_cases(middle)
        ),
    )


def sample_cases(tokens: int) -> list[str]:
    """The timed cases of the sample model: bfloat16 where the CPU computes in it."""
    through_openvino = [f"sample-{case}" for case in openvino_cases(tokens)]
    return [f"sample-dense {tokens}", f"sample-windows {tokens}", *through_openvino]


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, tokens = options.case.split()
    if model in _SAMPLE:
        run, vocab_size = _load_sample(model, options.models)
    else:
        run, vocab_size = load(model, options.models), VOCAB_SIZE
    ids = random_ids(int(tokens), vocab_size)
    # Hugging Face pads shorter pieces to the whole window, which takes time and warms up nothing more.
    return figures_of(run, ids, warm_up_tokens=2 * options.window)


def _load_sample(model: str, models: Path) -> tuple[Run, int]:
    """The sample model, and the size of its own vocabulary."""
    import hdruntime

    bundle, backend, precision = _SAMPLE[model]
    session = hdruntime.load(models / f"sample-{bundle}", backend=backend, precision=precision)
    return lambda ids: session(input_ids=ids)["last_hidden_state"], session.manifest.vocab_size


def _save_sample(models: Path, *, window: int, longest: int) -> None:
    from hdexport.attention.kinds import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model

    source, _ = default_model()
    kinds: dict[str, dict[str, Any]] = {"dense": {}, "windows": {"attention": attention_from_spec(f"window:{window}")}}
    for name, attention in kinds.items():
        output = models / f"sample-{name}"
        build(BuildOptions(model=source, output=output, max_len=longest, openvino=True, verify=None, **attention))


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import LongformerConfig

    lengths, window = sorted(options.tokens), options.window
    shape = {"hidden_size": options.hidden_size, "layers": options.layers}
    config_of = functools.partial(LongformerConfig, attention_window=2 * window, pad_token_id=1, sep_token_id=2)
    # Longformer's positions begin after the padding id, 1. It pads texts to a multiple of its window.
    save_models(options.models, config_of, **shape, longest=lengths[-1], rows=lengths[-1] + 2 * window + 2)
    _save_sample(options.models, window=window, longest=lengths[1])
    sample = sample_cases(lengths[1])
    return {
        "cases": [
            *(f"{model} {tokens}" for tokens in lengths for model in (BUNDLE, HUGGING_FACE, DENSE)),
            *openvino_cases(*lengths[1:]),
            *sample,
        ],
        "targets": targets(*lengths),
        "same_answers": {
            f"{model} {tokens}": (f"{other} {tokens}", _TOLERANCE)
            for model, other, compared in ((BUNDLE, HUGGING_FACE, lengths), (OPENVINO, BUNDLE, lengths[1:]))
            for tokens in compared
        }
        | {f"sample-{OPENVINO} {lengths[1]}": (f"sample-windows {lengths[1]}", _TOLERANCE)},
        **shape,
        "window": window,
    }


if __name__ == "__main__":
    sys.exit(main())
