"""Every attention type on a CPU: bundles in ONNX Runtime and OpenVINO against the library's model.

Usage: python -m benchmarks.cpu.attention [KIND ...] [--tokens 512 2048 4096] [--layers 1] [--rounds 3]
    [--cases WORD ...] [--output FILE]

The models have base shape (hidden size 768, 12 heads of 64, feed-forward 3072) and random weights, on which speed does
not depend. A case is a kind, who computes, and how many tokens: "bundle" is ours in ONNX Runtime, "openvino" and, where
the CPU has it, "openvino-bfloat16" ours in OpenVINO, "hugging-face" the library's own model in PyTorch, by
scaled_dot_product_attention where it has that; of "favor" that is a BERT with the same features. A bundle must give
the library's answer, and OpenVINO ONNX Runtime's.

A kind that is linear in tokens is also held against the library's model of "dense", at the longest length. OpenVINO's
targets are the conditions under which the runtime's `auto` takes it; OpenVINO's code, and the second copy that it has
of weights, are not in the growth of memory.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cpu.family_shapes import VOCAB_SIZE
from benchmarks.cpu.models import (
    BUNDLE,
    HUGGING_FACE,
    OPENVINO,
    OPENVINO_BFLOAT16,
    build_bundle,
    load,
    openvino_cases,
    save_checkpoint,
)
from benchmarks.cpu.targets import Figure, Target, figures_of, is_chosen, random_ids, run_cases

_TOLERANCE, _LEAST_COSINE = 1e-3, 0.99
_OPENVINO_CPU_TIME, _OPENVINO_MEMORY = 0.9, 1.0
_GROWTH = 1.1
"""Memory grows as the text does, at most times so much: a quadratic part would show."""

_LONG = 2048
"""Tokens from which on the growth of memory is a text's, and not a kernel's."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An attention type, as a model of base shape has it.

    Attributes:
        model_type: of the checkpoint.
        changes: of its configuration.
        spec: as ``--attention`` takes it; None for the model's own.
        latency: of the library's at the longest length, at most.
        memory: of the growth of the library's memory there, at most; None where nothing is expected.
        is_linear: whether time grows as the text does.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    spec: str | None = None
    latency: float
    memory: float | None
    is_linear: bool = False


DENSE = "dense"
_LSH = "lsh"

KINDS: dict[str, Kind] = {
    DENSE: Kind(model_type="bert", latency=1.0, memory=None),
    "window": Kind(model_type="longformer", latency=0.5, memory=0.5, is_linear=True),
    "blocks": Kind(model_type="big_bird", latency=0.6, memory=0.5, is_linear=True),
    "chunks": Kind(
        model_type="reformer", changes={"attn_layers": ["local"]}, latency=0.9, memory=0.5, is_linear=True
    ),
    _LSH: Kind(
        model_type="reformer", changes={"attn_layers": ["lsh"], "num_hashes": 4},
        latency=0.9, memory=0.5, is_linear=True,
    ),
    "local": Kind(
        model_type="longt5", changes={"encoder_attention_type": "local"}, latency=0.9, memory=0.35, is_linear=True
    ),
    "local-global": Kind(model_type="longt5", latency=0.9, memory=0.35, is_linear=True),
    "favor": Kind(model_type="bert", spec="favor:features=256", latency=1.0, memory=1.0, is_linear=True),
    "clipped-t5": Kind(model_type="t5", latency=0.7, memory=0.2),
    "clipped-mpnet": Kind(model_type="mpnet", latency=0.7, memory=0.2),
    "clipped-nezha": Kind(model_type="nezha", latency=0.7, memory=0.2),
    "disentangled": Kind(model_type="deberta-v2", latency=0.7, memory=0.2),
    "relative": Kind(model_type="xlnet", latency=0.6, memory=0.5),
    "traced": Kind(model_type="flaubert", changes={"max_position_embeddings": 4096}, latency=1.0, memory=1.0),
}  # fmt: skip


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096], help="lengths")
    parser.add_argument("--layers", type=int, default=1)
    parser.set_defaults(refuse=parser.error)
    return run_cases("benchmarks.cpu.attention", parser, _case_figures, _comparison)


def cases(name: str, lengths: list[int]) -> list[str]:
    """The timed cases of a kind."""
    through_openvino = openvino_cases(*lengths)
    if name == _LSH:  # the runtime refuses bfloat16, in which a graph cannot count
        through_openvino = [case for case in through_openvino if not case.startswith(OPENVINO_BFLOAT16)]
    ours = [f"{model} {tokens}" for tokens in lengths for model in (BUNDLE, HUGGING_FACE)]
    return [f"{name} {case}" for case in (*ours, *through_openvino)]


def targets(name: str, lengths: list[int]) -> list[Target]:
    """A kind's targets, of memory only where there is much of it."""
    kind, longest = KINDS[name], lengths[-1]
    ours, theirs, long = f"{name} {BUNDLE}", f"{name} {HUGGING_FACE}", [n for n in lengths if n >= _LONG]
    found = [Target(f"{ours} {longest}", f"{theirs} {longest}", Figure.LATENCY, kind.latency)]
    if kind.is_linear:
        found.append(Target(f"{ours} {longest}", f"{DENSE} {HUGGING_FACE} {longest}", Figure.LATENCY, 1.0))
    if long and kind.memory is not None:
        found.append(Target(f"{ours} {longest}", f"{theirs} {longest}", Figure.MEMORY, kind.memory))
    for fewer, more in itertools.pairwise(long):
        found.append(Target(f"{ours} {more}", f"{ours} {fewer}", Figure.MEMORY, _GROWTH * more / fewer))
    for case in cases(name, lengths):
        if OPENVINO in case:
            tokens = case.split()[-1]
            found.append(Target(case, f"{ours} {tokens}", Figure.CPU_TIME, _OPENVINO_CPU_TIME))
            if int(tokens) in long:
                found.append(Target(case, f"{ours} {tokens}", Figure.MEMORY, _OPENVINO_MEMORY))
    return found


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    name, model, tokens = options.case.split()
    run = load(model, options.models / name)
    return figures_of(run, random_ids(int(tokens), VOCAB_SIZE))


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from hdexport.attention.registry import attention_from_spec

    names, lengths = options.kinds or list(KINDS), sorted(options.tokens)
    if unknown := set(names) - set(KINDS):
        options.refuse(f"{', '.join(sorted(unknown))}: there are {', '.join(KINDS)}.")
    for name in names:
        if any(is_chosen(options, case) for case in cases(name, lengths)):
            kind, models = KINDS[name], options.models / name
            save_checkpoint(models, kind.model_type, layers=options.layers, changes=kind.changes)
            attention = attention_from_spec(kind.spec)
            build_bundle(models, max_len=lengths[-1], attention=attention, targets=("openvino",))
    every = {name: cases(name, lengths) for name in names}
    compared = {
        case: f"{name} {HUGGING_FACE if model == BUNDLE else BUNDLE} {tokens}"
        for name in names
        for case in every[name]
        for _, model, tokens in [case.split()]
        if model != HUGGING_FACE
    }
    return {
        "cases": [case for of_kind in every.values() for case in of_kind],
        "targets": [
            target
            for name in names
            for target in targets(name, lengths)
            if target.against is None or target.against.split()[0] in names
        ],
        # Rounding decides the buckets of a few tokens, and rounds more in bfloat16.
        "same_answers": {
            ours: (theirs, _TOLERANCE)
            for ours, theirs in compared.items()
            if OPENVINO_BFLOAT16 not in ours and not ours.startswith(_LSH)
        },
        "alike_answers": {ours: (theirs, _LEAST_COSINE) for ours, theirs in compared.items()},
        "tokens": lengths,
        "layers": options.layers,
    }


if __name__ == "__main__":
    sys.exit(main())
