"""Block-sparse attention on a CPU: a BigBird's bundle against Hugging Face's BigBird and dense attention of that shape.

Usage: python -m benchmarks.cpu.bigbird [--lengths 4096 8192 16384] [--rounds 5] [--output FILE]

The models have the shape of BigBird-base with four layers, blocks of 64, three random blocks, and random weights, on
which speed does not depend. Hugging Face's runs in block-sparse eager mode, its only one. "dense-sdpa" is a BERT of
that shape in PyTorch: the alternative without blocks. The bundle must give Hugging Face's answer in ONNX Runtime, and
ONNX Runtime's in OpenVINO, which is also timed in bfloat16. The longest texts are for memory: Hugging Face fills a
matrix of all pairs of tokens per head, so its growth is measured once and may not fit.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from benchmarks.cpu.models import (
    BUNDLE,
    HUGGING_FACE,
    OPENVINO,
    VOCAB_SIZE,
    add_shape_arguments,
    load,
    openvino_cases,
    openvino_targets,
    save_models,
)
from benchmarks.cpu.targets import Figure, Target, child_arguments, figures_of, is_chosen, random_ids, run_cases
from hdexport.bench.measure.calls import with_growth
from hdexport.bench.measure.processes import run_process
from hdexport.bench.results.result import Status

_MODULE = "benchmarks.cpu.bigbird"
_TOLERANCE = 1e-3
_TIME_LIMIT_S = 3600.0
_GROWTH_ALONE = "growth"
"""Prefix of a case that runs once and is not timed."""


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs=3, default=(4096, 8192, 16384), help="three, rising, in tokens")
    add_shape_arguments(parser)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--random", type=int, default=3, help="random blocks")
    parser.set_defaults(refuse=parser.error)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def cases(short: int, middle: int, long: int) -> list[str]:
    """The timed cases."""
    compared = [f"{model} {tokens}" for tokens in (short, middle) for model in (BUNDLE, HUGGING_FACE)]
    return [*compared, f"dense-sdpa {middle}", f"bundle {long}", *openvino_cases(short, middle)]


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """The bundle's targets for 4096, 8192 and 16384 tokens."""
    return (
        Target(f"bundle {short}", f"hugging-face {short}", Figure.LATENCY, 0.6),
        Target(f"bundle {middle}", f"hugging-face {middle}", Figure.LATENCY, 0.3),
        Target(f"bundle {middle}", f"dense-sdpa {middle}", Figure.LATENCY, 0.55),
        Target(f"bundle {long}", f"bundle {middle}", Figure.MEMORY, 2.2),
        *openvino_targets(short, middle),
    )


def _sparse_tokens(block: int, random: int) -> int:
    """A power of two that Hugging Face attends to sparsely: after a shorter text it stays dense."""
    return int(2 ** ((5 + 2 * random) * block).bit_length())


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    *alone, model, tokens = options.case.split()
    run, ids = load(model, options.models), random_ids(int(tokens), VOCAB_SIZE)
    sparse_tokens = _sparse_tokens(options.block, options.random)
    if alone == [_GROWTH_ALONE]:
        run(ids[:, :sparse_tokens])
        return {"growth_bytes": with_growth(lambda: run(ids))[1]}
    # Other models are warmed up with short texts, whose memory is missing in the growth.
    return figures_of(run, ids, **({"warm_up_tokens": sparse_tokens} if model == HUGGING_FACE else {}))


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import BigBirdConfig

    lengths = sorted(options.lengths)
    sparse_tokens = _sparse_tokens(options.block, options.random)
    if any(tokens % sparse_tokens for tokens in lengths):
        options.refuse(f"--lengths {' '.join(map(str, lengths))}: each has to be a multiple of {sparse_tokens}.")
    shape = {"hidden_size": options.hidden_size, "layers": options.layers}
    blocks = {"block_size": options.block, "num_random_blocks": options.random}
    config_of = functools.partial(BigBirdConfig, attention_type="block_sparse", **blocks, sep_token_id=2)
    save_models(options.models, config_of, **shape, longest=lengths[-1])
    growth = None
    if is_chosen(options, HUGGING_FACE):
        growth = _growth_of_hugging_face(lengths[-1], options)
        print(f"{HUGGING_FACE} {lengths[-1]}, memory growth, run once: {_said(growth)}")
    return {
        "cases": cases(*lengths),
        "targets": targets(*lengths),
        "same_answers": {
            f"{model} {tokens}": (f"{other} {tokens}", _TOLERANCE)
            for model, other in ((BUNDLE, HUGGING_FACE), (OPENVINO, BUNDLE))
            for tokens in lengths[:2]
        },
        "hugging_face_growth": growth,
        **shape,
        "block": options.block,
        "random": options.random,
    }


def _growth_of_hugging_face(tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """How far its memory grows, or why that is unknown."""
    case = f"{_GROWTH_ALONE} {HUGGING_FACE} {tokens}"
    command = ["-m", _MODULE, *child_arguments(options), "--case", case]
    outcome = run_process(command, time_limit_s=_TIME_LIMIT_S)
    found = outcome.output if outcome.status is Status.OK and outcome.output is not None else {"reason": outcome.reason}
    return {"tokens": tokens, "status": outcome.status.value, "peak_rss_bytes": outcome.peak_rss_bytes, **found}


def _said(growth: dict[str, Any]) -> str:
    if growth["status"] == Status.OK.value:
        return f"{growth['growth_bytes'] / 1e6:.0f} MB"
    return f"{growth['status']}, at {growth['peak_rss_bytes'] / 1e6:.0f} MB resident: {growth['reason']}"


if __name__ == "__main__":
    sys.exit(main())
